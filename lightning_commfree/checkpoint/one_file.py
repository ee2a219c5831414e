"""Makes one file of a checkpoint that is a folder.

`python -m lightning_commfree.checkpoint.one_file last.ckpt one.ckpt`
"""

from __future__ import annotations

import argparse
from pathlib import Path

from lightning_commfree.checkpoint.folder import REST, is_folder, read_folder
from lightning_commfree.checkpoint.whole_files import write_whole


def main() -> None:
    """Make one file of a folder."""
    parser = argparse.ArgumentParser(
        prog="python -m lightning_commfree.checkpoint.one_file",
        description="Makes one file of a checkpoint that is a folder, tensor by tensor.",
    )
    parser.add_argument("folder", type=Path, help="the checkpoint")
    parser.add_argument("file", type=Path, help="to be written; one that is there is replaced")
    parser.add_argument(
        "--trust", action="store_true", help="read more than plain values, which may run code"
    )
    options = parser.parse_args()
    if not is_folder(options.folder):
        parser.error(
            f"{str(options.folder)!r} is no such folder: it must have `{REST}` and `.metadata`."
        )
    if options.file.is_dir():
        parser.error(f"{str(options.file)!r} is a folder. Name a file.")
    try:
        write_whole(read_folder(options.folder, not options.trust), options.file)
    except RuntimeError as error:
        parser.exit(1, f"{error}\n")
    print(
        f"Wrote {str(options.file)!r}. Beside the folder it resumes as exactly as the folder does;"
        " elsewhere without what only single ranks know."
    )


if __name__ == "__main__":
    main()
