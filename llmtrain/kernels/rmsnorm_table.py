"""Windows of RMSNorm's routes. Written by scripts/bench/rmsnorm_routes.py; nothing is measured yet, these are the defaults."""

# fmt: off
# ruff: noqa: E501
# (width up to, ((rows up to or None for all others, the fields of a route), ...))
FORWARD: tuple = (
    (64, ((1024, (16, 4)), (None, (64, 4)),)),
    (128, ((1024, (8, 4)), (None, (32, 4)),)),
    (256, ((1024, (4, 4)), (None, (16, 4)),)),
    (512, ((1024, (2, 4)), (None, (8, 4)),)),
    (768, ((1024, (1, 4)), (None, (4, 4)),)),
    (1024, ((1024, (1, 4)), (None, (4, 4)),)),
    (1536, ((None, (1, 4)),)),
    (2048, ((None, (1, 4)),)),
    (4096, ((None, (1, 8)),)),
    (5120, ((None, (1, 16)),)),
    (6144, ((None, (1, 16)),)),
    (8192, ((None, (1, 16)),)),
)

BACKWARD: dict[bool, tuple] = {
    True: (
        (64, ((1024, ("columns", 16, 4, 0, 3, 32)), (None, ("partials", 16, 4, 8, 3, 0, 64)),)),
        (128, ((1024, ("columns", 8, 4, 0, 3, 32)), (None, ("partials", 8, 4, 8, 3, 0, 64)),)),
        (256, ((1024, ("columns", 4, 4, 0, 3, 32)), (None, ("partials", 4, 4, 8, 3, 0, 64)),)),
        (512, ((1024, ("columns", 2, 4, 0, 3, 32)), (None, ("partials", 2, 4, 8, 3, 0, 64)),)),
        (768, ((1024, ("columns", 1, 4, 0, 3, 32)), (None, ("partials", 1, 4, 8, 3, 0, 64)),)),
        (1024, ((1024, ("columns", 1, 4, 0, 3, 32)), (None, ("partials", 1, 4, 4)),)),
        (1536, ((1024, ("columns", 1, 4, 0, 3, 32)), (None, ("partials", 1, 4, 4)),)),
        (2048, ((1024, ("columns", 1, 4, 0, 3, 32)), (None, ("partials", 1, 4, 4)),)),
        (4096, ((1024, ("columns", 1, 4, 0, 3, 32)), (None, ("partials", 1, 8, 2)),)),
        (5120, ((1024, ("columns", 1, 8, 0, 3, 32)), (None, ("partials", 1, 16, 1)),)),
        (6144, ((1024, ("columns", 1, 8, 0, 3, 32)), (None, ("partials", 1, 16, 1)),)),
        (8192, ((1024, ("columns", 1, 8, 0, 3, 32)), (None, ("partials", 1, 16, 1)),)),
    ),
    False: (
        (64, ((1024, ("columns", 16, 4, 0, 3, 32)), (8192, ("atomic", 16, 4, 8, 3, 0, 64)), (None, ("partials", 16, 4, 8, 3, 0, 64)),)),
        (128, ((1024, ("columns", 8, 4, 0, 3, 32)), (8192, ("atomic", 8, 4, 8, 3, 0, 64)), (None, ("partials", 8, 4, 8, 3, 0, 64)),)),
        (256, ((1024, ("columns", 4, 4, 0, 3, 32)), (8192, ("atomic", 4, 4, 8, 3, 0, 64)), (None, ("partials", 4, 4, 8, 3, 0, 64)),)),
        (512, ((1024, ("columns", 2, 4, 0, 3, 32)), (8192, ("atomic", 2, 4, 8, 3, 0, 64)), (None, ("partials", 2, 4, 8, 3, 0, 64)),)),
        (768, ((1024, ("columns", 1, 4, 0, 3, 32)), (8192, ("atomic", 1, 4, 8, 3, 0, 64)), (None, ("partials", 1, 4, 8, 3, 0, 64)),)),
        (1024, ((1024, ("columns", 1, 4, 0, 3, 32)), (8192, ("atomic", 1, 4, 4)), (None, ("partials", 1, 4, 4)),)),
        (1536, ((1024, ("columns", 1, 4, 0, 3, 32)), (8192, ("atomic", 1, 4, 4)), (None, ("partials", 1, 4, 4)),)),
        (2048, ((1024, ("columns", 1, 4, 0, 3, 32)), (8192, ("atomic", 1, 4, 4)), (None, ("partials", 1, 4, 4)),)),
        (4096, ((1024, ("columns", 1, 4, 0, 3, 32)), (8192, ("atomic", 1, 8, 2)), (None, ("partials", 1, 8, 2)),)),
        (5120, ((1024, ("columns", 1, 8, 0, 3, 32)), (8192, ("atomic", 1, 16, 1)), (None, ("partials", 1, 16, 1)),)),
        (6144, ((1024, ("columns", 1, 8, 0, 3, 32)), (8192, ("atomic", 1, 16, 1)), (None, ("partials", 1, 16, 1)),)),
        (8192, ((1024, ("columns", 1, 8, 0, 3, 32)), (8192, ("atomic", 1, 16, 1)), (None, ("partials", 1, 16, 1)),)),
    ),
}
