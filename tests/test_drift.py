"""What kind of drift it is that made a prompt fork, said by a tokenizer; and that asking changes nothing of what is recorded."""

from __future__ import annotations

import asyncio
import logging
import random
import threading
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from sessiontree import Fork, MediaItem, Node, OutOfRange, Recorded, Session, SessionStore
from sessiontree.aio import AsyncStore
from sessiontree.drift import DRIFTS, Drift
from tests.qwen_vocabulary import END, EOT, SPECIAL, START, encode, qwen
from tests.test_prefixes import PICTURES, as_given, shown, text
from tests.toy import new_session, refuses, tree_digest


@cache
def ranks() -> dict[bytes, int]:
    """The whole vocabulary but for special tokens: each single byte is in it."""
    found: dict[bytes, int] = qwen()._tokenizer._mergeable_ranks
    return found


def raw(*pieces: bytes) -> list[int]:
    """The tokens of these bytes."""
    return [ranks()[piece] for piece in pieces]


def letters_of(said: str) -> list[int]:
    """One token a byte."""
    return raw(*(bytes([byte]) for byte in said.encode()))


def to_text(ids: list[int]) -> str:
    said: str = qwen().decode(ids)
    return said


def to_bytes(ids: list[int]) -> bytes:
    said: bytes = qwen()._tokenizer.decode_bytes(ids)
    return said


DECODERS: dict[str, Callable[[list[int]], str | bytes]] = {"str": to_text, "bytes": to_bytes}
ASKED = [START, *encode("user\nGo on."), END, *encode("\n"), START, *encode("assistant\n")]
NEXT = [*encode("\n"), START, *encode("user\nAnd then?"), END, *encode("\n"), START, *encode("assistant\n")]


def text_session() -> Session:
    return SessionStore.in_memory().create("drift", scheme="text@hf5")


def record_both(known: Sequence[int], prompt: Sequence[int], **options: Any) -> tuple[Recorded, Recorded]:
    """A reply, and a prompt that is to leave it."""
    session = text_session()
    return session.record(ASKED, known), session.record(prompt, [1], **options)


def drift_between(
    known: Sequence[int], after: Sequence[int], decoder: str = "str", special: Sequence[int] = SPECIAL
) -> Drift | None:
    """Between a reply and what stands in its place, and goes on behind it, in a later prompt."""
    first, second = record_both(known, [*ASKED, *after], decode=DECODERS[decoder], special_ids=special)
    fork = second.fork
    assert fork is not None
    assert (fork.kind, fork.node) == ("token", first.completion)
    assert (fork.known, fork.given) == (known[fork.at - len(ASKED)], [*ASKED, *after][fork.at])
    return fork.drift


# --- what real tokenizers and templates do --------------------------------------------------------------------------------
PIECES = [*encode("hel"), *encode("lo"), *encode(" wor"), *encode("ld")]
PARROT = encode("ok 🦜")
CASES: dict[str, tuple[Sequence[int], Sequence[int], Drift]] = {
    "a reply sampled in other pieces": ([*PIECES, END], [*encode("hello world"), END, *NEXT], "retokenised"),
    "its pieces merged with what follows": (encode("hello\n"), encode("hello\n\n\nmore"), "retokenised"),
    "a reply that the prompt ends in": ([*PIECES, END], encode("hello"), "retokenised"),
    "line breaks put together": (
        [*encode("a \n"), *encode("\n"), *encode("b"), END],
        [*encode("a \n\nb"), END, *NEXT],
        "retokenised",
    ),
    "bytes of a character apart": ([*raw(b"\xf0\x9f", b"\xa6", b"\x9c"), END], [*encode("🦜"), END], "retokenised"),
    "a reply cut inside a character": ([*encode("o"), *encode("k"), *PARROT[1:-1]], [*PARROT, END, *NEXT], "retokenised"),
    "a character that text has lost": (PARROT[:-1], [*encode("ok \ufffd"), END, *NEXT], "retokenised"),
    "whitespace in the middle": ([*encode("a \n\n b"), END], [*encode("a \n b"), END, *NEXT], "whitespace"),
    "a reply that is trimmed": ([*encode("hello \n"), END], [*encode("hello"), END, *NEXT], "whitespace"),
    "a space before a mark": ([*encode("hello"), END], [*encode("hello "), END, *NEXT], "whitespace"),
    "whitespace and other pieces": ([*PIECES, *encode("\t"), END], [*encode("hello world"), END, *NEXT], "whitespace"),
    "the line break of a template": ([*encode("hello"), END, *NEXT], [*encode("hello"), END, *NEXT[1:]], "special"),
    "another end": ([*encode("hello"), EOT], [*encode("hello"), END, *NEXT], "special"),
    "an end that is gone": ([*encode("hello"), END, EOT], [*encode("hello"), END, *NEXT], "special"),
    "an end in the middle": ([*encode("hello world"), END], [*encode("hello"), END, *encode(" world"), END, *NEXT], "special"),
    "an end and its whitespace": ([*encode("hello \n"), EOT], [*encode("hello"), END, *NEXT], "special"),
    "a mark as text": ([*encode("hello"), START, *encode("x"), END], [*encode("hello<|im"), *encode("_start|>x"), END], "special"),
    "reasoning that is stripped": ([*encode("<think>\nHm.\n</think>\n\nhello"), END], [*encode("hello"), END, *NEXT], "content"),
    "another reply": ([*encode("hello world"), END], [*encode("hello moon"), END, *NEXT], "content"),
    "other pieces, and another end": ([*PIECES, *encode("!"), END], [*encode("hello world?"), END, *NEXT], "content"),
    "another call": ([*encode('{"a": 1}'), END], [*encode('{"a":2}'), END, *NEXT], "content"),
    "a character instead of half of one": (raw(b"\xf0\x9f"), [*encode("A"), END, *NEXT], "content"),
}


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("case", CASES)
def test_d33_a_drift_says_what_kind_it_is(case: str, decoder: str) -> None:
    known, after, drift = CASES[case]
    assert drift_between(known, after, decoder) == drift


def test_d33_a_beginning_that_is_repeated() -> None:
    session = text_session()
    session.record([EOT, *encode("Hello there")], [7])
    fork = session.record([EOT, EOT, *encode("Hello there")], [7], decode=to_text, special_ids=SPECIAL).fork
    assert fork is not None
    assert (fork.at, fork.given, fork.drift) == (1, EOT, "special")


def test_without_special_ids_what_they_are_written_as_counts() -> None:
    assert drift_between([*encode("hello"), END, *NEXT], [*encode("hello"), END, *NEXT[1:]], special=()) == "whitespace"
    assert drift_between([*encode("hello"), EOT], [*encode("hello"), END, *NEXT], special=()) == "content"
    assert drift_between([*PIECES, END], [*encode("hello world"), END, *NEXT], special=()) == "retokenised"


def test_a_tokenizer_of_transformers_is_a_decoder() -> None:
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    said = ["hello world, naïve café 東京 🦜"] * 5
    model.train_from_iterator(
        said, tokenizers.trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, special_tokens=["</s>"])
    )
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=model, eos_token="</s>")
    [end] = tokenizer.all_special_ids
    for words in ("hello world", "naïve café", "東京 🦜"):
        whole = tokenizer.encode(words)
        letters = [token for byte in words.encode() for token in tokenizer.convert_tokens_to_ids([letter_of(byte)])]
        assert tokenizer.decode(letters) == tokenizer.decode(whole) == words
        for after, drift in (
            ([*whole, end], "retokenised"),
            ([*whole, *whole], "special"),
            ([*tokenizer.encode("wor"), end], "content"),
        ):
            session = text_session()
            session.record([end, 5], [*letters, end])
            fork = session.record([end, 5, *after], [1], decode=tokenizer.decode, special_ids=tokenizer.all_special_ids).fork
            assert fork is not None
            assert fork.drift == drift, (words, after)


def letter_of(byte: int) -> str:
    """How byte-level vocabularies write a byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return chr(byte) if byte in plain else chr(256 + [other for other in range(256) if other not in plain].index(byte))


# --- any text, in any pieces ---------------------------------------------------------------------------------------------
WORDS = st.text(st.sampled_from("abc xyz.,\n\t éü東京🦜{}\"'0123"), min_size=1, max_size=60)


def in_pieces(ids: Sequence[int], chance: random.Random) -> list[int]:
    """The same bytes in smaller tokens: each token is cut in two, again and again, or not."""
    waiting, made = [qwen()._tokenizer.decode_single_token_bytes(token) for token in reversed(ids)], list[int]()
    while waiting:
        piece = waiting.pop()
        cuts = [cut for cut in range(1, len(piece)) if piece[:cut] in ranks() and piece[cut:] in ranks()]
        if cuts and chance.random() < 0.5:
            cut = chance.choice(cuts)
            waiting += [piece[cut:], piece[:cut]]
        else:
            made.append(ranks()[piece])
    return made


@given(
    words=WORDS, seed=st.integers(0, 2**32), decoder=st.sampled_from(sorted(DECODERS)), swapped=st.booleans(), goes_on=st.booleans()
)
@example(words="🦜", seed=1, decoder="str", swapped=False, goes_on=True)
def test_c64_tokens_cut_into_smaller_ones_are_retokenised(
    words: str, seed: int, decoder: str, swapped: bool, goes_on: bool
) -> None:
    whole = encode(words)
    known, after = in_pieces(whole, random.Random(seed)), whole
    assume(known != after)
    assert to_bytes(known) == to_bytes(after) == words.encode()
    if swapped:
        known, after = after, known
    assert drift_between([*known, END], [*after, END, *(NEXT if goes_on else ())], decoder) == "retokenised"
    if known != after[: len(known)]:  # a reply without an end, of which something follows
        assert drift_between(known, [*after, *encode("\n\nmore")], decoder) == "retokenised"


@given(
    words=st.lists(st.text("abcé東🦜", min_size=1, max_size=8), min_size=2, max_size=8),
    spaces=st.lists(st.sampled_from([" ", "\n", "\n\n", " \n\t ", "  "]), min_size=16, max_size=16),
    seed=st.integers(0, 2**32),
    decoder=st.sampled_from(sorted(DECODERS)),
)
def test_d33_other_whitespace_is_whitespace(words: list[str], spaces: list[str], seed: int, decoder: str) -> None:
    one = "".join(word + space for word, space in zip(words, spaces, strict=False))
    two = "".join(word + space for word, space in zip(words, spaces[8:], strict=False))
    assume(one != two)
    known, after = in_pieces(encode(one), random.Random(seed)), encode(two)
    assert drift_between([*known, END], [*after, END, *NEXT], decoder) == "whitespace"


@given(
    words=st.text("abcé東🦜 ", min_size=1, max_size=20).map(str.strip).filter(bool),
    places=st.lists(st.tuples(st.integers(0, 20), st.sampled_from([EOT, START, END, 151700])), min_size=1, max_size=4),
    seed=st.integers(0, 2**32),
    decoder=st.sampled_from(sorted(DECODERS)),
    swapped=st.booleans(),
)
def test_d33_other_special_tokens_are_special(
    words: str, places: list[tuple[int, int]], seed: int, decoder: str, swapped: bool
) -> None:
    chance, plain, marked, done = random.Random(seed), encode(words), list[int](), 0
    for place, token in sorted((min(place, len(words) - 1), token) for place, token in places):
        marked += [*in_pieces(encode(words[done:place]), chance), token]
        done = max(done, place)
    marked += in_pieces(encode(words[done:]), chance)
    known, after = (marked, plain) if swapped else (plain, marked)
    known, after = [*known, END], [*after, END, *NEXT]
    assume(after[: len(known)] != known)  # as where an end is repeated: then nothing forks
    assert drift_between(known, after, decoder) == "special"


@given(words=WORDS, at=st.integers(0, 60), letter=st.sampled_from("qQ§"), seed=st.integers(0, 2**32))
def test_c64_another_letter_is_content(words: str, at: int, letter: str, seed: int) -> None:
    at %= len(words)
    assume(words[at].strip())
    known, after = in_pieces(encode(words), random.Random(seed)), encode(words[:at] + letter + words[at + 1 :])
    assert drift_between([*known, END], [*after, END, *NEXT]) == "content"


# --- what is compared ------------------------------------------------------------------------------------------------------
def test_of_many_samples_the_one_that_was_sent_again_is_named() -> None:
    """Eight rollouts from one prompt: the others say something else from the same token on."""
    replies = [f"{word} is what I would say." for word in ("Hello", "Help", "Here", "High", "Hot", "How", "Her", "Hey")]
    for number, reply in enumerate(replies):
        session = text_session()
        letters = [letters_of(each) for each in replies]
        samples = [session.record(ASKED, [*ids, END]).completion for ids in letters]
        prompt = [*ASKED, *encode(reply), END, *NEXT]
        fork = session.record(prompt, [1], decode=to_text, special_ids=SPECIAL).fork
        assert fork == Fork(len(ASKED), "token", samples[number], ranks()[b"H"], encode(reply)[0], "retokenised")
        session = text_session()
        samples = [session.record(ASKED, [*ids, END]).completion for ids in letters]
        plain = session.record(prompt, [1]).fork
        assert plain == Fork(len(ASKED), "token", samples[0], ranks()[b"H"], encode(reply)[0])


def test_a_sample_is_found_behind_tokens_that_it_shares_with_others() -> None:
    shared = encode("The answer")
    ends = [" is one.", " is two.", " was three."]
    for number, end in enumerate(ends):
        session = text_session()
        sample = [session.record(ASKED, [*shared, *letters_of(each), END]).completion for each in ends][number]
        session.record([*ASKED, *shared[:1], *encode(" nothing")], [3])  # another one leaves them before
        fork = session.record([*ASKED, *shared, *encode(end), END], [1], decode=to_text, special_ids=SPECIAL).fork
        assert fork is not None
        assert (fork.node, fork.drift) == (sample, "retokenised")


def test_a_sample_that_left_before_is_none_to_compare_with() -> None:
    """Though from there on it says what the prompt says."""
    session, body = text_session(), encode(" one two three four five six seven eight nine ten")
    first = session.record(ASKED, [*encode("A"), *body, *encode(" red"), END]).completion
    session.record(ASKED, [*encode("B"), *body, *letters_of(" blue"), END])
    prompt = [*ASKED, *encode("A"), *body, *encode(" blue"), END]
    fork = session.record(prompt, [1], decode=to_text, special_ids=SPECIAL).fork
    assert fork is not None
    assert (fork.node, fork.at, fork.drift) == (first, len(prompt) - 2, "content")


class Counting:
    """A decoder that knows how much it was asked."""

    def __init__(self) -> None:
        self.ids = 0
        self.calls = 0

    def __call__(self, ids: list[int]) -> str:
        assert type(ids) is list
        assert all(type(token) is int for token in ids)
        self.calls += 1
        self.ids += len(ids)
        return to_text(ids)


@pytest.mark.parametrize("length", [1_000, 100_000])
def test_what_is_read_is_bounded(length: int) -> None:
    said = ("hello world, " * length)[:length]
    letters = letters_of(said)
    cases: list[tuple[list[int], Drift, int]] = [
        ([*encode("moon"), *letters[4:]], "content", 300),
        (encode(said), "retokenised", 20_000),
    ]
    for after, drift, most in cases:
        decode = Counting()
        session = text_session()
        session.record(ASKED, [*letters, END])
        fork = session.record([*ASKED, *after, END, *NEXT * 1_000], [1], decode=decode).fork
        assert fork is not None
        assert fork.drift == drift
        assert decode.ids <= most
        assert decode.calls <= 8


def test_the_rest_of_a_long_node_counts() -> None:
    """What is alike for the first tokens may differ later: the greater difference is told, up to some thousand tokens."""
    letters = letters_of("hello world, " * 100)
    for last, drift in (("!", "content"), ("\n", "whitespace"), ("", "retokenised")):
        known = [*letters, *encode("."), END]
        assert drift_between(known, [*encode("hello world, " * 100 + last + "."), END, *NEXT]) == drift


def test_a_prompt_in_far_more_tokens_is_read_as_far_as_the_known_part_goes() -> None:
    said = "hello wonderful world, " * 20
    for last, drift in (("?", "content"), (" !", "whitespace"), ("!", "retokenised")):
        assert drift_between([*encode(said + "!"), END], [*letters_of(said + last), END, *NEXT]) == drift
    for last, drift in (("jello", "content"), ("hello", "whitespace")):  # what counts comes late
        assert drift_between([*encode("hello"), END], [*letters_of(" " * 500), *encode(last), END, *NEXT]) == drift
        assert drift_between([*encode("hello"), END], [*[EOT] * 500, *encode(last), END]) == (
            drift if last == "jello" else "special"
        )


def test_nothing_is_asked_where_no_token_differs() -> None:
    def never(ids: list[int]) -> str:
        raise AssertionError

    session = new_session()
    prompt, items = as_given([*text(1, 2), *shown(PICTURES[0]), *text(3, 4)])
    first = session.record(prompt, [5, 6], items, decode=never)
    assert first.fork is None
    assert session.record([*prompt, 5, 6, 7], [8], items, decode=never).fork is None
    ended = session.record(prompt[:1], [8], decode=never).fork
    other = session.record(prompt, [8], as_given([*text(1, 2), *shown(PICTURES[1]), *text(3, 4)])[1], decode=never).fork
    assert ended is not None
    assert other is not None
    assert [(fork.kind, fork.drift) for fork in (ended, other)] == [("end", None), ("media", None)]


# --- media ------------------------------------------------------------------------------------------------------------------
def seen(picture: int, fill: int, before: str = "Look:", after: str = "What is it?") -> tuple[list[int], list[MediaItem]]:
    """A prompt with a picture, at the placeholder ids of some engine."""
    cells = [*text(START, *encode("user\n" + before), 151652), *shown(PICTURES[picture], fill), *text(151653, *encode(after), END)]
    return as_given(cells)


@pytest.mark.parametrize("fill", [151655, 1_000_007])
def test_placeholders_say_what_item_they_are_of(fill: int) -> None:
    """Whatever their ids are: those that engines write over them are no tokens that a decoder knows."""

    def drift(known: tuple[list[int], list[MediaItem]], given: tuple[list[int], list[MediaItem]]) -> Drift | None:
        session = new_session()
        session.record(known[0], [1], known[1])
        fork = session.record(given[0], [1], given[1], decode=to_text, special_ids=SPECIAL).fork
        assert fork is not None
        return fork.drift

    first = seen(0, 151655, before="Look:\n\n")
    ids, items = seen(0, fill, before="Look:\n\n")
    apart = [*ids[:3], *letters_of("Look:\n\n"), *ids[ids.index(151652) :]]
    added = len(apart) - len(ids)
    moved = apart, [item.with_spans((offset + added, size) for offset, size in item.spans) for item in items]
    assert drift(first, moved) == "retokenised"
    assert drift(first, seen(0, fill, before="Look: ")) == "whitespace"
    assert drift(first, seen(1, fill, before="Look: ")) == "content"
    assert drift(first, seen(0, fill, before="Look: ", after="Who is it?")) == "content"
    if fill != 151655:
        assert drift(first, seen(0, fill, before="Look:\n\n")) == "special"
    # A template's whitespace is that between two special tokens: not what stands between one and a picture's placeholders.
    broken, close = (as_given([*text(*before), *shown(PICTURES[0], fill), *text(END)]) for before in ((END, *encode("\n")), (END,)))
    assert drift(broken, close) == "whitespace"


# --- decoders that fail ----------------------------------------------------------------------------------------------------
def raises(ids: list[int]) -> str:
    raise KeyError("no such token")


FAILING: dict[str, Callable[[list[int]], Any]] = {
    "raises": raises,
    "gives ids": lambda ids: ids,
    "gives nothing": lambda ids: None,
    "takes no ids": len,
    "does not know the ids": lambda ids: to_text([token + 151851 for token in ids]),
}


@pytest.mark.parametrize("failing", FAILING)
def test_a_decoder_that_fails_loses_nothing(failing: str, caplog: pytest.LogCaptureFixture) -> None:
    prompt = [*ASKED, *encode("hello world"), END, *NEXT]
    plain, asked = text_session(), text_session()
    for session in (plain, asked):
        session.record(ASKED, [*PIECES, END])
    expected = plain.record(prompt, [1], key="k")
    with caplog.at_level(logging.WARNING, "sessiontree.drift"):
        recorded = asked.record(prompt, [1], key="k", decode=FAILING[failing], special_ids=SPECIAL)
    assert recorded.fork is not None
    assert recorded.fork.drift == "unknown"
    assert recorded._replace(fork=recorded.fork._replace(drift=None)) == expected
    assert tree_digest(asked.tree) == tree_digest(plain.tree)
    [said] = caplog.records
    assert said.exc_info is not None


@pytest.mark.parametrize("decoder", [*DECODERS, "none"])
@pytest.mark.parametrize("case", CASES)
def test_a_decoder_changes_nothing_of_what_is_recorded(case: str, decoder: str) -> None:
    known, after, _ = CASES[case]
    options = {"decode": DECODERS.get(decoder), "special_ids": SPECIAL}
    trees = []
    for asked in ({}, options):
        _, recorded = record_both(known, [*ASKED, *after], **asked)
        trees.append([(node.id, node.links, node.metadata) for node in recorded.completion.path()])
    assert trees[0] == trees[1]


def test_who_interrupts_the_decoder_records_nothing() -> None:
    session = text_session()
    session.record(ASKED, [*PIECES, END])
    before = tree_digest(session.tree)

    def interrupted(ids: list[int]) -> str:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        session.record([*ASKED, *encode("hello world")], [1], decode=interrupted)
    assert tree_digest(session.tree) == before
    assert session.record([*ASKED, *encode("hello world")], [1], decode=to_text).fork is not None


@pytest.mark.parametrize("prompt", [ASKED, [*ASKED, *encode("hello world")]], ids=["not asked", "asked"])
def test_what_is_no_decoder_is_refused_and_changes_nothing(prompt: list[int]) -> None:
    session = text_session()
    session.record(ASKED, [*PIECES, END])
    for options in ({"decode": "utf-8"}, {"decode": to_text, "special_ids": ["<|im_end|>"]}, {"decode": to_text, "special_ids": 5}):
        refuses(TypeError, session, partial(session.record, prompt, [1], **options))
    refuses(OutOfRange, session, partial(session.record, prompt, [1], decode=to_text, special_ids=[-1]))


def test_the_decoder_may_use_the_session_and_holds_up_nobody() -> None:
    session = text_session()
    first = session.record(ASKED, [*PIECES, END])
    made: list[Node] = []

    def meanwhile(ids: list[int]) -> str:
        other = threading.Thread(target=lambda: made.append(session.append(first.completion, [len(made)])))
        other.start()
        other.join(60)
        assert not other.is_alive()
        made.append(session.append(first.prompt, [len(made)]))
        return to_text(ids)

    recorded = session.record([*ASKED, *encode("hello world"), END], [1], decode=meanwhile, special_ids=SPECIAL)
    assert recorded.fork is not None
    assert recorded.fork.drift == "retokenised"
    assert len(made) >= 4
    assert all(node in session.tree for node in (*made, recorded.completion))


def test_under_asyncio_it_is_the_same() -> None:
    async def run() -> None:
        async with AsyncStore(SessionStore.in_memory()) as store:
            session = await store.create("drift", scheme="text@hf5")
            await session.record(ASKED, [*PIECES, END])
            prompt = [*ASKED, *encode("hello world"), END, *NEXT]
            recorded = await session.record(prompt, [1], decode=to_text, special_ids=SPECIAL)
            assert recorded.fork is not None
            assert recorded.fork.drift == "retokenised"

    asyncio.run(run())


def test_all_kinds_are_met() -> None:
    assert {drift for *_, drift in CASES.values()} | {"unknown"} == set(DRIFTS)
