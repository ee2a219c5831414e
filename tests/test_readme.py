"""What the READMEs tell a reader to type works: every command, and every block of Python.

They are found in the pages, so one that is added is tested. `reader.py` says what is done with a
command, and what is not tried.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel
from lightning.pytorch.strategies import DDPStrategy
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import lightning_commfree
from recipes.data.tokenizer import byte_tokenizer
from tests.pages import commands_of, python_of
from tests.reader import COPY, ROOT, STOPPED, Reader

READMES = ("README.md", "recipes/README.md", "benchmarks/README.md")
DOCS = tuple(path.relative_to(ROOT).as_posix() for path in sorted(ROOT.glob("docs/*.md")))
PAGES = {page: (ROOT / page).read_text("utf-8") for page in READMES + DOCS}
COMMANDS = dict.fromkeys(command for text in PAGES.values() for command in commands_of(text))
BLOCKS = [block for text in PAGES.values() for block in python_of(text)]
PUBLIC = {name: getattr(lightning_commfree, name) for name in lightning_commfree.__all__}


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    """In a folder that looks like the repository's root, with files that a reader may have."""
    folder = tmp_path_factory.mktemp("workplace")
    for name in ("conf", "recipes"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "tools").mkdir()
    for tool in ("cat", "ls"):
        (folder / "tools" / tool).symlink_to(f"/bin/{tool}")
    _write_text(folder)
    _write_models(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        reader = Reader(patch)
        reader.type_in(f"python -m recipes.pretrain hydra.run.dir={STOPPED}")
        (folder / STOPPED / "wandb_run_id.txt").write_text("1234abcd\n")
        shutil.copytree(STOPPED, COPY)
        yield reader


def _write_text(folder: Path) -> None:
    lines = [f"{i} green bottles hanging on the wall\n" for i in range(400)]
    (folder / "books").mkdir()
    (folder / "books" / "bottles.txt").write_text("".join(lines))
    (folder / "held_out.txt").write_text("".join(lines[:40]))
    pairs = [(f"{i} + 1 = ", f"{i + 1}") for i in range(60)]
    tasks = [{"prompt": prompt, "response": response} for prompt, response in pairs]
    chats = [
        {"messages": [{"role": "user", "content": p}, {"role": "assistant", "content": r}]}
        for p, r in pairs
    ]
    for name, examples in (("tasks.jsonl", tasks), ("chats.jsonl", chats)):
        (folder / name).write_text("".join(f"{json.dumps(example)}\n" for example in examples))


def _write_models(folder: Path) -> None:
    """Write what `from_pretrained` would else ask the hub for."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (ROOT / "recipes/data/templates/plain.jinja").read_text()
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    common = {"vocab_size": len(tokenizer), "hidden_size": 16, **ends}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 2}
    models = {
        "gpt2": GPT2LMHeadModel(GPT2Config(n_positions=512, **common, **heads)),
        "path/to/llama": LlamaForCausalLM(
            LlamaConfig(max_position_embeddings=512, intermediate_size=32, **common, **heads)
        ),
    }
    for path, model in models.items():
        model.save_pretrained(folder / path)
        tokenizer.save_pretrained(folder / path)


def _broken_links(page: Path, text: str) -> list[str]:
    """Return the relative links of a page that lead to nothing: no file, or no such heading."""
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        target, _, heading = link.partition("#")
        if "://" in link:
            continue
        file = (page.parent / target) if target else page
        read = file.read_text("utf-8") if file.suffix == ".md" and file.is_file() else ""
        headings = re.findall(r"^#+ (.*)$", read, re.M)
        anchors = {re.sub(r"[^\w\- ]", "", text).lower().replace(" ", "-") for text in headings}
        if not file.exists() or (heading and heading not in anchors):
            broken.append(link)
    return broken


def test_links_between_the_pages_lead_somewhere() -> None:
    for page, text in PAGES.items():
        assert _broken_links(ROOT / page, text) == [], page

    wrong = "[a](docs/nothing.md) [b](README.md#no-heading) [c](README.md#install) [d](docs)"
    assert _broken_links(ROOT / "README.md", wrong) == ["docs/nothing.md", "README.md#no-heading"]


def _not_on_a_package_page(text: str) -> list[str]:
    """Return the relative links of a README, outside of the part that says so: they lead nowhere.

    There is no address of the repository that they could be made absolute with.
    """
    return [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]


def test_the_readme_says_which_links_do_not_work_on_a_package_page() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    before, _, links = text.partition("These links lead into the repository")
    pictures = re.findall(r"!\[[^\]]{40,}\]\(([^)\s]+)\)", before)  # with words in their place
    assert _not_on_a_package_page(before) == pictures
    assert len(pictures) == 2
    assert len(_not_on_a_package_page(links)) > 10


def test_the_readme_is_read_in_two_minutes() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    assert len(text.splitlines()) <= 150
    assert len(text.split()) < 1000
    bullets = re.findall(r"^- (.*(?:\n  .*)*)", text, re.MULTILINE)
    assert max(len(bullet.split()) for bullet in bullets) <= 40


def _shown(command: str) -> str:
    return " ".join(command.partition("#")[0].replace("\\", " ").split()) or "a script"


@pytest.mark.parametrize("command", COMMANDS, ids=_shown)
def test_a_command(command: str, reader: Reader) -> None:
    reader.type_in(command)


@pytest.mark.parametrize(
    ("page", "wrong"),
    [
        ("```console\n$ python -m recipes.pretrain \\\n    trainer.max_stepz=9\n```", "max_stepz"),
        ("Say\n`python -m\nrecipes.plan step_time=1` now.", "`bandwidth` must be given"),
        ("`python -m recipes.pretrian`", "recipes.pretrian"),
        ("`python -m benchmarks.lion_step --rouns 3`", "--rouns"),
        (
            "`python -m recipes.pretrain data=text data.corpus.train=x data.corpus.validation=x`",
            "'x' matches no file",
        ),
        ("`python -m recipes.pretrain trainer=multinode`", "it would wait for the other nodes"),
        ("`torchrun --nnodes 2 --nproc-per-node 4 -m recipes.pretrain trainer=multinode`", "ranks"),
        ("`torchrun --nnode 2 -m recipes.pretrain --nope`", "nope"),
        ("`make demonstration`", "demonstration"),
        ("`python examples/no_such.py`", "there is no examples/no_such.py"),
        ("```console\n$ python -m pip install '.[recipe]'\n```", "there is no extra recipe"),
        ("`torchrun --nnodes 3 examples/two_machines.py`", "asks for other ranks"),
        ("```bash\ncommfree-plan --parameters 10 --blocks 2\n```", "--step-time"),
        ("```bash\nrm -r outputs\n```", "rm: command not found"),
        ("```bash\ncat no/such\n```", "no/such"),
    ],
)
def test_a_command_that_does_not_work_is_found(
    page: str, wrong: str, reader: Reader, capsys
) -> None:
    [command] = commands_of(page)
    with pytest.raises((AssertionError, ImportError)) as failed:
        reader.type_in(command)
    assert wrong in f"{failed.value}{capsys.readouterr().err}"


def _calls_shown(block: str) -> Iterator[ast.Call]:
    """Yield the calls that stand in a block for themselves, of what the package exports."""
    for statement in ast.parse(block).body:
        match statement:
            case ast.Expr(value=ast.Call(func=ast.Name(id=name)) as call) if name in PUBLIC:
                yield call


def _assert_shows_the_signature(call: ast.Call) -> None:
    shown = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
    own = inspect.signature(PUBLIC[call.func.id].__init__).parameters
    own = {n: p for n, p in own.items() if n != "self" and p.kind is not p.VAR_KEYWORD}
    inherited = inspect.signature(DDPStrategy.__init__).parameters
    assert not call.args
    assert list(shown)[: len(own)] == list(own), "all of its own parameters, in its order"
    for name, value in shown.items():
        assert value == {**inherited, **own}[name].default, name


def test_every_strategy_is_shown_with_its_defaults() -> None:
    calls = [call for block in BLOCKS for call in _calls_shown(block)]
    for call in calls:
        _assert_shows_the_signature(call)
    assert {call.func.id for call in calls} == {n for n in PUBLIC if n.endswith("Strategy")}


@pytest.mark.parametrize(
    "settings", ["", "split='auto'", "split='token', num_micro_batches=2", "2", "timeout=3"]
)
def test_another_signature_is_found(settings: str) -> None:
    whole = ast.parse(
        "DominoTPStrategy(tensor_parallel_size=None, split='auto', num_micro_batches=2)"
    )
    _assert_shows_the_signature(whole.body[0].value)
    [call] = _calls_shown(f"DominoTPStrategy({settings})")
    with pytest.raises((AssertionError, KeyError)):
        _assert_shows_the_signature(call)


@pytest.mark.parametrize("block", BLOCKS)
def test_a_block_of_python(block: str, monkeypatch, tmp_path) -> None:
    """It trains, on one node and for a moment; a module that it defines makes an optimizer."""
    monkeypatch.chdir(tmp_path)
    short = {"num_nodes": 1, "max_steps": 2, "logger": False, "enable_checkpointing": False}
    trainer = lightning.Trainer
    monkeypatch.setattr(lightning, "Trainer", lambda **kwargs: trainer(**{**kwargs, **short}))
    names: dict[str, Any] = {
        "L": lightning,
        **PUBLIC,
        "model": BoringModel(),
        "data": BoringDataModule(),
    }
    given = set(names)
    try:
        exec(compile(block, "README", "exec"), names)
        if "trainer" in names:
            assert names["trainer"].global_step == 2
        for name in names.keys() - given:
            if isinstance(names[name], type) and issubclass(names[name], lightning.LightningModule):
                module = names[name]()
                module.layer = torch.nn.Linear(2, 2)
                assert isinstance(module.configure_optimizers(), torch.optim.Optimizer)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
