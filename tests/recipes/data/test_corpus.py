from __future__ import annotations

import lzma

import numpy as np
import pytest

from recipes.data.corpus import MarkovChain, Shakespeare, TextFiles


@pytest.fixture
def books(tmp_path):
    folder = tmp_path / "books"
    (folder / "old").mkdir(parents=True)
    (folder / "b.txt").write_text("second")
    (folder / "a.txt").write_text("first")
    (folder / "old" / "c.txt.xz").write_bytes(lzma.compress(b"third"))
    (tmp_path / "held_out.txt").write_text("one\n\ntwo")
    return tmp_path


def test_globs_lists_and_xz(books) -> None:
    held_out = str(books / "held_out.txt")
    everything = TextFiles(f"{books}/books/**/*.txt*", held_out)
    assert list(everything.documents("train")) == ["first", "second", "third"]
    assert list(everything.documents("validation")) == ["one\n\ntwo"]
    listed = TextFiles([f"{books}/books/b.txt", f"{books}/books/a*"], held_out)
    assert list(listed.documents("train")) == ["first", "second"]


def test_fingerprint_follows_the_content(books) -> None:
    def fingerprint(separator=None):
        return TextFiles(f"{books}/books/*.txt", f"{books}/held_out.txt", separator).fingerprint()

    first = fingerprint()
    assert fingerprint() == first
    assert fingerprint("x") != first
    (books / "books" / "a.txt").write_text("First")
    assert fingerprint() != first


@pytest.mark.parametrize(("train", "validation"), [("no*.txt", "held_out.txt"), ("*.txt", "no")])
def test_a_path_that_matches_nothing(books, train, validation) -> None:
    with pytest.raises(FileNotFoundError, match=r"'.*/no.*' matches no file .*Give a file"):
        TextFiles(f"{books}/{train}", f"{books}/{validation}")


def test_a_folder_is_no_file(books) -> None:
    with pytest.raises(FileNotFoundError, match="matches no file"):
        TextFiles(f"{books}/books", f"{books}/held_out.txt")


def test_a_file_in_both_splits(books) -> None:
    with pytest.raises(ValueError, match=r"training and validation splits share 1 file,"):
        TextFiles(f"{books}/*.txt", f"{books}/held_out.txt")


def test_shakespeare_is_split_into_works() -> None:
    corpus = Shakespeare()
    train, validation = list(corpus.documents("train")), list(corpus.documents("validation"))
    assert len(train) == 39
    assert sum(map(len, train)) == pytest.approx(4_689_203, abs=3 * 39)  # separators are cut out
    titles = [work.splitlines()[0] for work in validation]
    assert titles == ["HAMLET, PRINCE OF DENMARK", "THE SONNETS", "THE TEMPEST"]
    assert not set(titles) & {work.splitlines()[0] for work in train}


def test_the_markov_chains_entropy_is_the_loss_of_its_own_bigrams() -> None:
    chain = MarkovChain(num_states=8, train_characters=100_000, seed=1)
    [text] = chain.documents("train")
    states = np.frombuffer(text.encode(), dtype=np.uint8) - ord("a")
    counts_SS = np.zeros((8, 8))
    np.add.at(counts_SS, (states[:-1], states[1:]), 1)
    bigrams_SS = counts_SS / counts_SS.sum(axis=1, keepdims=True)
    loss = -np.log(bigrams_SS[states[:-1], states[1:]]).mean()
    assert loss == pytest.approx(chain.entropy_nats, abs=0.01)
    # the likely mistake, rows that all weigh the same, is out of tolerance
    positive_SS = np.where(chain.transitions_SS > 0, chain.transitions_SS, 1.0)
    unweighted = -(chain.transitions_SS * np.log(positive_SS)).sum(axis=1).mean()
    assert abs(unweighted - chain.entropy_nats) > 0.01


def test_the_markov_chain_repeats_itself_and_has_two_splits() -> None:
    def texts(seed):
        chain = MarkovChain(train_characters=500, validation_characters=500, seed=seed)
        return [*chain.documents("train"), *chain.documents("validation"), chain.fingerprint()]

    assert texts(1) == texts(1)
    assert texts(1) != texts(2)
    train, validation, _ = texts(1)
    assert train != validation


@pytest.mark.parametrize("num_states", [1, 27])
def test_too_few_or_too_many_states(num_states) -> None:
    with pytest.raises(ValueError, match=f"num_states={num_states} must be within 2 to 26"):
        MarkovChain(num_states=num_states)


def test_bytes_that_are_no_utf8_are_named(books) -> None:
    (books / "books" / "d.txt").write_bytes("na\xefve".encode("latin1"))
    corpus = TextFiles(f"{books}/books/d.txt", f"{books}/held_out.txt")
    with pytest.raises(ValueError, match=r"d.txt' is not UTF-8: byte 0xef at offset 2 \(.*iconv"):
        list(corpus.documents("train"))


def test_a_damaged_xz_is_named(books) -> None:
    path = books / "books" / "old" / "c.txt.xz"
    path.write_bytes(path.read_bytes()[:-8])
    corpus = TextFiles(str(path), f"{books}/held_out.txt")
    with pytest.raises(ValueError, match=r"c.txt.xz' is not a complete xz file"):
        list(corpus.documents("train"))
