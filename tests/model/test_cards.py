import pytest

from llmtrain.model.cards import CARDS, card_named, card_of


def test_a_card_is_known_by_its_drivers_name():
    names = {
        "NVIDIA H200": "H200", "NVIDIA H100 80GB HBM3": "H100", "NVIDIA H100 PCIe": "H100-PCIe",
        "NVIDIA A100-SXM4-40GB": "A100-40", "NVIDIA A100-SXM4-80GB": "A100-80", "NVIDIA A100 80GB PCIe": "A100-80",
        "NVIDIA L40S": "L40S", "NVIDIA L4": "L4", "NVIDIA GeForce RTX 4090": "4090", "NVIDIA RTX A6000": "A6000",
        "NVIDIA RTX 6000 Ada Generation": "6000-Ada",
    }  # fmt: skip
    found = {device: card.name if (card := card_of(device)) else None for device in names}
    assert found == names
    assert card_of("Imaginary 9000") is None


@pytest.mark.parametrize(
    ("said", "name"),
    [("H200", "H200"), ("h100", "H100"), ("A100", "A100-80"), ("a100-40", "A100-40"), ("A100-80GB", "A100-80"),
     ("RTX 4090", "4090"), ("rtx-4090", "4090"), ("NVIDIA GeForce RTX 3090", "3090"), ("6000 ada", "6000-Ada")],
)  # fmt: skip
def test_a_person_may_call_it_in_several_ways(said: str, name: str):
    assert card_named(said).name == name


def test_every_card_can_be_named_by_its_name_and_another_name_is_refused():
    assert all(card_named(card.name) is card and card_of(card.device_name) is card for card in CARDS)
    for wrong in ("TPU", "", "9090"):
        with pytest.raises(ValueError, match="is not known; known are B200, H200"):
            card_named(wrong)
