"""Windows of RMSNorm's routes. Written by scripts/bench/rmsnorm_routes.py; measured on NVIDIA H200: widths 256, 512, 768, 1024, 2048, 4096, 6144."""

# fmt: off
# ruff: noqa: E501
# (width up to, ((rows up to or None for all others, the fields of a route), ...))
FORWARD: tuple = (
    (64, ((1024, (16, 4)), (None, (64, 4)),)),
    (128, ((1024, (8, 4)), (None, (32, 4)),)),
    (256, ((256, (4, 4)), (65536, (8, 4)), (None, (16, 4)),)),
    (512, ((1024, (1, 1)), (16384, (4, 4)), (None, (8, 4)),)),
    (768, ((65536, (1, 1)), (None, (4, 4)),)),
    (1024, ((None, (1, 1)),)),
    (1536, ((None, (1, 4)),)),
    (2048, ((None, (1, 4)),)),
    (4096, ((4096, (1, 8)), (None, (1, 4)),)),
    (5120, ((None, (1, 16)),)),
    (6144, ((None, (1, 8)),)),
    (8192, ((None, (1, 16)),)),
)

BACKWARD: dict[bool, tuple] = {
    True: (
        (64, ((1024, ("columns", 16, 4, 0, 3, 32)), (None, ("partials", 16, 4, 8, 3, 0, 64)),)),
        (128, ((1024, ("columns", 8, 4, 0, 3, 32)), (None, ("partials", 8, 4, 8, 3, 0, 64)),)),
        (256, ((256, ("columns", 4, 4, 0, 3, 32)), (4096, ("partials", 4, 2, 8)), (16384, ("partials", 4, 4, 4)), (65536, ("partials", 4, 4, 8, 3, 0, 64)), (None, ("partials", 4, 2, 8)),)),
        (512, ((256, ("partials", 2, 4, 8, 3, 0, 64)), (1024, ("columns", 2, 4, 0, 3, 32)), (None, ("partials", 2, 2, 8)),)),
        (768, ((256, ("columns", 1, 4, 0, 3, 64)), (1024, ("partials", 1, 4, 4)), (4096, ("partials", 1, 4, 6)), (None, ("partials", 1, 2, 8)),)),
        (1024, ((1024, ("columns", 1, 4, 0, 3, 32)), (None, ("partials", 1, 4, 6)),)),
        (1536, ((1024, ("columns", 1, 4, 0, 3, 32)), (None, ("partials", 1, 4, 4)),)),
        (2048, ((256, ("columns", 1, 4, 0, 3, 32)), (1024, ("partials", 1, 4, 4)), (4096, ("partials", 1, 4, 2)), (None, ("partials", 1, 4, 4)),)),
        (4096, ((4096, ("partials", 1, 8, 2)), (16384, ("partials", 1, 4, 2)), (None, ("partials", 1, 4, 3)),)),
        (5120, ((1024, ("columns", 1, 8, 0, 3, 32)), (None, ("partials", 1, 16, 1)),)),
        (6144, ((256, ("columns", 1, 8, 0, 3, 32)), (1024, ("partials", 1, 8, 1)), (4096, ("partials", 1, 8, 3)), (None, ("partials", 1, 16, 1)),)),
        (8192, ((1024, ("columns", 1, 8, 0, 3, 32)), (None, ("partials", 1, 16, 1)),)),
    ),
    False: (
        (64, ((1024, ("columns", 16, 4, 0, 3, 32)), (8192, ("atomic", 16, 4, 8, 3, 0, 64)), (None, ("partials", 16, 4, 8, 3, 0, 64)),)),
        (128, ((1024, ("columns", 8, 4, 0, 3, 32)), (8192, ("atomic", 8, 4, 8, 3, 0, 64)), (None, ("partials", 8, 4, 8, 3, 0, 64)),)),
        (256, ((256, ("columns", 4, 4, 0, 3, 32)), (4096, ("partials", 4, 2, 8)), (16384, ("partials", 4, 4, 4)), (65536, ("atomic", 4, 4, 4)), (None, ("partials", 4, 2, 8)),)),
        (512, ((256, ("partials", 2, 4, 8, 3, 0, 64)), (1024, ("columns", 2, 4, 0, 3, 32)), (None, ("partials", 2, 2, 8)),)),
        (768, ((256, ("columns", 1, 4, 0, 3, 64)), (1024, ("partials", 1, 4, 4)), (4096, ("partials", 1, 4, 6)), (None, ("partials", 1, 2, 8)),)),
        (1024, ((1024, ("columns", 1, 4, 0, 3, 32)), (None, ("partials", 1, 4, 6)),)),
        (1536, ((1024, ("columns", 1, 4, 0, 3, 32)), (8192, ("atomic", 1, 4, 4)), (None, ("partials", 1, 4, 4)),)),
        (2048, ((256, ("columns", 1, 4, 0, 3, 32)), (1024, ("partials", 1, 4, 4)), (4096, ("partials", 1, 4, 2)), (None, ("partials", 1, 4, 4)),)),
        (4096, ((4096, ("partials", 1, 8, 2)), (16384, ("partials", 1, 4, 2)), (None, ("partials", 1, 4, 3)),)),
        (5120, ((1024, ("columns", 1, 8, 0, 3, 32)), (8192, ("atomic", 1, 16, 1)), (None, ("partials", 1, 16, 1)),)),
        (6144, ((256, ("columns", 1, 8, 0, 3, 32)), (1024, ("partials", 1, 8, 1)), (4096, ("partials", 1, 8, 3)), (None, ("partials", 1, 16, 1)),)),
        (8192, ((1024, ("columns", 1, 8, 0, 3, 32)), (8192, ("atomic", 1, 16, 1)), (None, ("partials", 1, 16, 1)),)),
    ),
}
