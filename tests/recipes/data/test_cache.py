from __future__ import annotations

import multiprocessing
import time

import pytest

from recipes.data.cache import build_once


def _build_slowly(folder, rank):
    def build(path):
        (folder / f"built_by_{rank}").touch()
        with path.open("w") as file:
            for _ in range(20):
                file.write("line\n")
                file.flush()
                time.sleep(0.01)  # long enough that the others arrive in between

    build_once(folder / "cache" / "result", build)
    # whoever comes back finds the whole file
    assert (folder / "cache" / "result").read_text() == "line\n" * 20


def test_processes_that_start_together_build_once(tmp_path) -> None:
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=_build_slowly, args=(tmp_path, rank)) for rank in range(4)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    assert [process.exitcode for process in ranks] == [0] * 4
    assert len(list(tmp_path.glob("built_by_*"))) == 1


def test_an_interrupted_build_leaves_nothing(tmp_path) -> None:
    def interrupted(path):
        path.write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_once(tmp_path / "result", interrupted)
    assert [path.name for path in tmp_path.iterdir() if path.suffix != ".lock"] == []
    build_once(tmp_path / "result", lambda path: path.write_text("whole"))
    assert (tmp_path / "result").read_text() == "whole"
