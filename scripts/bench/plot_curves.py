"""Draws the loss curves that check_step.py recorded.

    python scripts/bench/plot_curves.py docs/data/check_step.json docs/bf16-against-fp32.png
"""

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

STYLES = {
    "fp32": ("black", 2.0), "captured": ("tab:blue", 1.2), "captured 2": ("tab:cyan", 1.0), "seed": ("tab:orange", 1.0),
}  # fmt: skip
NAMES = {"fp32": "FP32", "captured": "bf16", "captured 2": "bf16, the same again", "seed": "bf16, another seed"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("image", type=Path)
    args = parser.parse_args()
    result = json.loads(args.data.read_text())
    figure, (whole, end) = plt.subplots(1, 2, figsize=(10, 4), constrained_layout=True)
    for name, (color, width) in STYLES.items():
        losses = result["curves"][name]
        steps = range(1, len(losses) + 1)
        for axes, begin in ((whole, 0), (end, len(losses) * 3 // 4)):
            axes.plot(steps[begin:], losses[begin:], color=color, linewidth=width, label=NAMES[name])
    whole.set(title=f"{result['model']} on one corpus", xlabel="step", ylabel="training loss, nats")
    end.set(title="the last quarter", xlabel="step")
    whole.legend()
    figure.savefig(args.image, dpi=110)


if __name__ == "__main__":
    main()
