"""Fine-tune by a composed configuration in JSON, as one of the ranks that torchrun has started."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from recipes.training.finetuning import build
from recipes.training.run import fit

if __name__ == "__main__":
    fit(json.loads(Path(sys.argv[1]).read_text()), build)
