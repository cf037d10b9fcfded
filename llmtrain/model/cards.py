"""Cards by name: what they multiply, hold and draw, so that a run can be reckoned without one."""

from dataclasses import dataclass

MIB = 2**20


@dataclass(frozen=True)
class Card:
    """A card as its vendor's data sheet has it."""

    name: str
    """What a person calls it."""
    words: tuple[str, ...]
    """What its driver's name holds, all of them."""
    bf16: float
    """Dense FLOP/s in bf16 with sums in FP32."""
    memory: int
    """Bytes, as nvidia-smi counts them."""
    watts: int
    """Its power limit, as delivered."""
    capability: tuple[int, int]
    """CUDA's compute capability."""

    @property
    def device_name(self) -> str:
        """As a driver may call it."""
        return " ".join(self.words)


# The first whose words are all in a driver's name is the card, so a name that is part of another comes after it.
CARDS = (
    Card("B200", ("B200",), 2250e12, 183_359 * MIB, 1000, (10, 0)),
    Card("H200", ("H200",), 989e12, 143_771 * MIB, 700, (9, 0)),
    Card("H100-NVL", ("H100 NVL",), 835e12, 95_830 * MIB, 400, (9, 0)),
    Card("H100-PCIe", ("H100 PCIe",), 756e12, 81_559 * MIB, 350, (9, 0)),
    Card("H100", ("H100",), 989e12, 81_559 * MIB, 700, (9, 0)),
    Card("A100-40", ("A100", "40GB"), 312e12, 40_960 * MIB, 400, (8, 0)),
    Card("A100-80", ("A100",), 312e12, 81_920 * MIB, 400, (8, 0)),
    Card("L40S", ("L40S",), 362e12, 46_068 * MIB, 350, (8, 9)),
    Card("L4", ("NVIDIA L4",), 121e12, 23_034 * MIB, 72, (8, 9)),
    Card("6000-Ada", ("RTX 6000 Ada",), 364e12, 49_140 * MIB, 300, (8, 9)),
    Card("A6000", ("RTX A6000",), 155e12, 49_140 * MIB, 300, (8, 6)),
    Card("5090", ("RTX 5090",), 209e12, 32_607 * MIB, 575, (12, 0)),
    Card("4090", ("RTX 4090",), 165e12, 24_564 * MIB, 450, (8, 9)),
    Card("3090", ("RTX 3090",), 71e12, 24_576 * MIB, 350, (8, 6)),
    Card("3060", ("RTX 3060",), 25e12, 12_288 * MIB, 170, (8, 6)),
)


def card_of(device_name: str) -> Card | None:
    """The card that a driver calls so; None for one that is not in the table."""
    return next((card for card in CARDS if all(word in device_name for word in card.words)), None)


def card_named(name: str) -> Card:
    """The card that a person calls so: H200, a100-80, RTX 4090. Raises ValueError with the names there are."""

    def plain(text: str) -> str:
        text = text.lower().removeprefix("nvidia ").removeprefix("geforce ")
        return "".join(c for c in text.replace("rtx", "").removesuffix("gb") if c.isalnum())

    asked = plain(name)
    found = [card for card in CARDS if plain(card.name) == asked]
    found += [card for card in CARDS if plain(card.name).startswith(asked) and asked][::-1]  # A100 is the larger one
    if not found:
        raise ValueError(f"card {name!r} is not known; known are {', '.join(card.name for card in CARDS)}")
    return found[0]
