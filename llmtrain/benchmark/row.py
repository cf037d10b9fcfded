"""One row of a sweep, in a process of its own: `python -m llmtrain.benchmark.row OUTPUT.json < REQUEST.json`.

The request holds `shape` and `timing`. What is written is what `measure_step` returns with `status` "ok", or `status`
"oom" and the `reason` where the row does not fit. Anything else that goes wrong ends the process with a traceback.
"""

import json
import sys
from pathlib import Path
from typing import Any

from llmtrain.benchmark.config import TimingConfig, shape_from
from llmtrain.benchmark.step import measure_step
from llmtrain.training.fit import out_of_memory


def run_row(request: dict[str, Any]) -> dict[str, Any]:
    """The result of one request, out of memory included."""
    try:
        return {"status": "ok"} | measure_step(shape_from(request["shape"]), TimingConfig(**request["timing"]))
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        return {"status": "oom", "reason": str(error).split("\n")[0]}


def main() -> None:
    request = json.load(sys.stdin)
    Path(sys.argv[1]).write_text(json.dumps(run_row(request)))


if __name__ == "__main__":
    main()
