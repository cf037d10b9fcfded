"""What is asked of a card's driver, with a driver that is made up."""

import sys
import time
from types import SimpleNamespace

import pytest
import torch

from llmtrain.training.card import Card, figures


class NVMLError(Exception):
    pass


def driver(**functions) -> SimpleNamespace:
    def unknown(*arguments):
        raise NVMLError("not supported")

    names = ("Init", "DeviceGetHandleByUUID", "DeviceGetTemperature", "DeviceGetPowerUsage")
    names += ("DeviceGetUtilizationRates", "DeviceGetMemoryInfo")
    made = {f"nvml{name}": functions.get(name, unknown) for name in names}
    return SimpleNamespace(NVMLError=NVMLError, NVML_TEMPERATURE_GPU=0, **made)


def test_figures_are_in_their_units_and_what_a_card_does_not_know_is_left_out():
    whole = driver(
        DeviceGetTemperature=lambda handle, sensor: 71,
        DeviceGetPowerUsage=lambda handle: 648_200,
        DeviceGetUtilizationRates=lambda handle: SimpleNamespace(gpu=99),
        DeviceGetMemoryInfo=lambda handle: SimpleNamespace(used=3 << 30),
    )
    known = {"card_c": 71.0, "card_w": pytest.approx(648.2), "card_busy": 0.99, "card_used_gib": 3.0}
    assert figures(whole, None) == known
    assert figures(driver(DeviceGetPowerUsage=lambda handle: 1000), None) == {"card_w": 1.0}


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    properties = SimpleNamespace(uuid="12-34")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    return torch.device("cuda")


def test_the_card_is_the_one_that_torch_uses_and_is_asked_by_a_thread(cuda, monkeypatch: pytest.MonkeyPatch):
    asked = []

    def handle(uuid):
        asked.append(uuid)
        return "handle"

    nvml = driver(Init=lambda: None, DeviceGetHandleByUUID=handle, DeviceGetTemperature=lambda handle, sensor: 50)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    card = Card(cuda)
    end = time.monotonic() + 30
    while not card.now():
        assert time.monotonic() < end
        time.sleep(0.001)
    card.close()
    assert card.now() == {"card_c": 50.0} and asked == ["GPU-12-34"]


def test_without_a_card_a_package_or_an_answer_there_is_nothing(cuda, monkeypatch: pytest.MonkeyPatch):
    assert Card(torch.device("cpu")).now() == {}
    for module in (None, driver(), driver(Init=lambda: None)):
        monkeypatch.setitem(sys.modules, "pynvml", module)
        card = Card(cuda)
        assert card.now() == {}
        card.close()
