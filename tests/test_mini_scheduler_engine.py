"""The mini scheduler's engine: its model is transformers', batches change nothing, and every shortage is survived."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from mini_scheduler.encoder import EncoderCache
from mini_scheduler.engine import Engine, EngineFault, QueueFull
from mini_scheduler.model import MODELS, ROWS, Model, PagedBatch, load_model, tiny_text_model
from mini_scheduler.pages import PagePool
from mini_scheduler.requests import Output, Request, Sampling
from mini_scheduler.sampler import logprob, sample
from mini_scheduler.scheduler import Scheduler
from mini_scheduler.text import IM_END, Detokenizer, decode, encode
from numpy.typing import NDArray
from qwen_reference import TEXT, VOCABULARY, Picture, Turn, landscape, picture, plain, replay, tiny_model, user_turn

from engine_bridge import page_hashes
from sessiontree import (
    CorruptTree,
    LimitExceeded,
    MediaItem,
    NeedsMedia,
    Node,
    OutOfRange,
    Session,
    SessionStore,
    StoreClosed,
    Unsupported,
    media_identity,
)

VL, TEXT_ONLY = MODELS


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def models() -> dict[str, Model]:
    return {name: load_model(name) for name in MODELS}


@pytest.fixture(scope="module")
def pictures() -> list[Picture]:
    return [picture("red", plain("crimson")), picture("photo", landscape())]


@attrs.define
class Lab:
    """A session on disk, a scheduler over it, and what its requests were told."""

    store: SessionStore
    session: Session
    scheduler: Scheduler
    told: dict[str, list[Output]] = attrs.field(factory=dict)

    def turn(self, parent: Node, turn: Turn) -> Node:
        items = []
        for offset, shown in turn.pictures:
            identity = media_identity("image", shown.pixel_values, options={"grid_thw": shown.grid_thw[0].tolist()})
            item = MediaItem("image", identity, [(offset, shown.num_tokens)], grid_thw=shown.grid_thw[0].tolist())
            self.store.put_features(item, {"pixel_values": shown.pixel_values})
            items.append(item)
        return self.session.append(parent, turn.token_ids, media=items)

    def request(self, prompt: Node, key: str, salt: str | None = None, for_training: bool = False, **sampling: Any) -> Request:
        self.told[key] = []
        chosen = Sampling(**{"max_new_tokens": 8, "temperature": 0.0, **sampling})
        draft = self.session.draft(prompt, key=key)
        return Request(draft, chosen, self.told[key].append, salt=salt, for_training=for_training)

    def run(self, *requests: Request) -> list[Node]:
        self.scheduler.waiting.extend(requests)
        while self.scheduler.busy:
            self.scheduler.step()
            assert not any(request.draft.num_computed_tokens or request.pages for request in self.scheduler.waiting)
        return [self.node(request) for request in requests]

    def node(self, request: Request) -> Node:
        node = self.told[request.draft.key][-1].node
        assert node is not None, self.told[request.draft.key][-1]
        return node

    def ids(self, key: str) -> list[int]:
        return [token for output in self.told[key] for token in output.token_ids]


Labs = Callable[..., Lab]


@pytest.fixture
def lab(tmp_path: Path, models: dict[str, Model]) -> Iterator[Labs]:
    stores: list[SessionStore] = []

    def make(name: str = VL, **options: Any) -> Lab:
        model = models[name]
        store = SessionStore.open(tmp_path / str(len(stores)))
        stores.append(store)
        space = {"tenant": "t", "cache_salt": "t"}
        session = store.create("s", scheme=model.scheme, model_fingerprint=model.fingerprint, namespace=space)
        return Lab(store, session, Scheduler(store, model, **options))

    yield make
    for store in stores:
        store.close()


def prompts(count: int, shown: Sequence[Picture | None]) -> list[Turn]:
    """Turns of different lengths that begin alike; they show one of ``shown`` in turn."""
    begin = "Be brief, be exact, and say for each of your claims why you think that it is so. "
    return [user_turn(f"{begin}{n}. " + "Why? " * (5 * n), shown[n % len(shown)], after_reply=False) for n in range(count)]


# The model


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=4)
@given(data=st.data())
def test_a_token_comes_out_the_same_in_any_batch(models: dict[str, Model], name: str, data: st.DataObject) -> None:
    model, length = models[name], 150
    ids = torch.from_numpy(np.random.default_rng(5).integers(0, TEXT, length + 16))
    cuts = sorted(data.draw(st.sets(st.integers(1, length - 1), max_size=6)))
    others = data.draw(st.lists(st.integers(0, 9), min_size=len(cuts) + 1, max_size=len(cuts) + 1))
    own = torch.from_numpy(np.random.default_rng(data.draw(st.integers(0, 9))).permutation(20)[:10].astype(np.int64))

    def run(windows: list[tuple[int, int, int]], pages: torch.Tensor) -> torch.Tensor:
        cache, rows = model.new_cache(21, 16), []
        for start, stop, beside in windows:
            index = torch.cat((torch.arange(beside), torch.arange(start, stop), torch.zeros(ROWS, dtype=torch.int64)))
            count = stop - start + beside
            index = index[: -(-count // ROWS) * ROWS]
            number = torch.zeros(len(index), dtype=torch.int64)
            number[beside:count] = 1
            table = torch.zeros(2, -(-stop // 128) * 8, dtype=torch.int64)
            table[0, 0], table[1, : min(10, table.shape[1])] = 20, pages[: table.shape[1]]
            places = table[number, index // 16] * 16 + index % 16
            tokens = torch.where(number == 1, ids[index], ids[length + index % 16])
            positions = index.expand(model.num_position_axes, -1)
            batch = PagedBatch(places[:count], table, number, index)
            rows.append(model.forward(tokens, positions, [], torch.arange(beside, count), cache, batch))
        return torch.cat(rows)

    whole = run([(0, length, 0)], torch.arange(10))
    pieces = run(list(zip([0, *cuts], [*cuts, length], others, strict=True)), own)
    assert torch.equal(whole, pieces)


def test_replies_are_those_of_transformers(lab: Labs, pictures: list[Picture]) -> None:
    """Over three turns, a picture in each, pages found again for all but the last turn."""
    here, judge = lab(max_batch_tokens=24), tiny_model(3)
    said: list[Turn] = []
    node = here.session.root
    for number, shown in enumerate((*pictures, pictures[0])):
        said.append(user_turn(f"What is number {number}?", shown, after_reply=number > 0))
        (node,) = here.run(here.request(here.turn(node, said[-1]), str(number)))
        reply = replay(judge, said, 8).reply
        assert here.ids(str(number)) == list(reply) == node.token_ids.tolist()
        said.append(Turn(reply))
    assert here.scheduler.counters.encoded_items == 2  # the third picture is the first one again
    assert here.scheduler.counters.cached_tokens > 100


# The scheduler


@pytest.mark.parametrize("name", MODELS)
def test_shortage_changes_no_reply(lab: Labs, pictures: list[Picture], name: str) -> None:
    """Beside plenty: chunks of a few tokens, preemption, eviction and recomputing from drafts, over two turns each."""
    turns = prompts(9, [None, *pictures] if name == VL else [None])
    plenty, short = lab(name), lab(name, num_pages=12, max_batch_tokens=16, max_running=5)
    replies = []
    for here in (plenty, short):
        first = here.run(*[here.request(here.turn(here.session.root, turn), f"a{n}") for n, turn in enumerate(turns)])
        onward = [here.session.append(node, encode("And then?")) for node in first]
        second = here.run(*[here.request(prompt, f"b{n}") for n, prompt in enumerate(onward)])
        replies.append([node.token_ids.tolist() for node in (*first, *second)])
        assert [output.finish_reason for output in here.told["a0"][:-1]] == [None] * 7
    assert replies[0] == replies[1]
    counters = short.scheduler.counters
    assert counters.preemptions and short.scheduler.pool.evicted and counters.cached_tokens
    assert plenty.scheduler.counters.preemptions == plenty.scheduler.pool.evicted == 0
    for here in (plenty, short):
        assert here.scheduler.pool.available == here.scheduler.pool.num_pages  # nothing is held when nothing runs


def test_replies_wait_for_no_prompt(lab: Labs) -> None:
    """A long prompt is computed in chunks, beside which a reply gets a token in every step."""
    here = lab(TEXT_ONLY, max_batch_tokens=16)
    replying = here.request(here.session.append(here.session.root, encode("Hi")), "a", max_new_tokens=20)
    here.scheduler.waiting.append(replying)
    here.scheduler.step()
    long = here.request(here.session.append(here.session.root, encode("Why? " * 60)), "b", max_new_tokens=1)
    here.scheduler.running.insert(0, long)  # it came first
    here.scheduler._find_prefix(long)
    steps = 0
    while not here.told["b"]:
        before = len(replying.draft)
        here.scheduler.step()
        assert len(replying.draft) == before + 1 and long.draft.num_computed_tokens in (15 * (steps + 1), long.draft.stop - 1)
        steps += 1
    assert steps == -(-long.draft.parent.stop // 15)


def test_who_was_preempted_comes_before_those_that_wait(lab: Labs) -> None:
    here = lab(TEXT_ONLY, num_pages=6, max_running=2)
    requests = [
        here.request(here.session.append(here.session.root, [n, 1, 2]), key, max_new_tokens=60) for n, key in enumerate("abc")
    ]
    here.scheduler.waiting.extend(requests)
    while not here.scheduler.counters.preemptions:
        here.scheduler.step()
    assert [request.draft.key for request in (*here.scheduler.running, *here.scheduler.waiting)] == ["a", "b", "c"]
    while here.scheduler.busy:
        here.scheduler.step()
    assert [len(here.ids(key)) for key in "abc"] == [60] * 3


def test_samples_share_their_prompts_pages(lab: Labs) -> None:
    here = lab(TEXT_ONLY)
    prompt = here.session.append(here.session.root, encode("word " * 100))
    requests = [here.request(prompt, f"s{n}", temperature=1.0, max_new_tokens=4) for n in range(4)]
    here.scheduler.waiting.extend(requests)
    shared = (prompt.stop - 1) // 16
    held: set[tuple[int, ...]] = set()
    while here.scheduler.busy:
        here.scheduler.step()
        if len(here.scheduler.running) == 4:
            tables = [request.pages for request in here.scheduler.running]
            held |= {tuple(table[:shared]) for table in tables}
            assert len({page for table in tables for page in table[shared:]}) == sum(len(table) - shared for table in tables)
    assert len(held) == 1
    assert here.scheduler.counters.prefill_tokens < prompt.stop + 4 * 32  # the prompt was computed once
    assert len({tuple(here.ids(f"s{n}")) for n in range(4)}) == 4


def test_a_fork_copies_no_page_and_computes_only_what_is_new(lab: Labs) -> None:
    here = lab(TEXT_ONLY)
    (reply,) = here.run(here.request(here.session.append(here.session.root, encode("long " * 200)), "r"))
    forked = here.store.fork(here.session, reply, "other")
    prompt = forked.append(reply, encode("Go on."))
    before = here.scheduler.counters.prefill_tokens
    here.told["f"] = []
    here.run(Request(forked.draft(prompt, key="f"), Sampling(max_new_tokens=2, temperature=0.0), here.told["f"].append))
    assert here.told["f"][-1].cached_tokens == (reply.stop - 1) // 16 * 16
    assert here.scheduler.counters.prefill_tokens - before == prompt.stop - here.told["f"][-1].cached_tokens


@pytest.mark.parametrize("length", [31, 32, 33])
def test_a_prompt_that_is_there_whole_runs_its_last_token_again(lab: Labs, length: int) -> None:
    here = lab(TEXT_ONLY)
    prompt = here.session.append(here.session.root, range(100, 100 + length))
    here.run(here.request(prompt, "a", seed=1), here.request(prompt, "b", salt="other", seed=1))
    here.run(here.request(prompt, "c", seed=1))
    assert here.told["c"][-1].cached_tokens == (length - 1) // 16 * 16
    assert here.ids("a") == here.ids("b") == here.ids("c")


def test_another_salt_finds_nothing(lab: Labs, pictures: list[Picture]) -> None:
    here = lab()
    prompt = here.turn(here.session.root, user_turn("What is it?", pictures[1], after_reply=False))
    one, other = here.run(here.request(prompt, "a", salt="x")), here.run(here.request(prompt, "b", salt="y"))
    assert here.ids("a") == here.ids("b") and one != other
    assert [here.told[key][-1].cached_tokens for key in "ab"] == [0, 0]
    assert here.scheduler.counters.encoded_items == 2
    here.run(here.request(prompt, "c", salt="y"))
    assert here.told["c"][-1].cached_tokens == (prompt.stop - 1) // 16 * 16
    assert here.scheduler.counters.encoded_items == 2


def test_pages_go_and_nodes_stay(lab: Labs) -> None:
    here = lab(TEXT_ONLY, num_pages=8, page_size=16)
    (reply,) = here.run(here.request(here.session.append(here.session.root, encode("one " * 60)), "a"))
    ids, positions, number = reply.input_ids(), reply.positions(), len(here.session.tree)
    here.run(here.request(here.session.append(here.session.root, encode("two " * 112)), "b"))
    assert here.scheduler.pool.evicted
    assert not here.scheduler.pool.find(page_hashes(reply, "sglang", 16))
    assert np.array_equal(reply.input_ids(), ids) and np.array_equal(reply.positions(), positions)
    assert len(here.session.tree) == number + 2
    again = here.request(here.session.append(reply, encode("more")), "c", max_new_tokens=2)
    here.run(again)
    fresh = here.request(again.draft.parent, "d", salt="none", max_new_tokens=2)
    here.run(fresh)
    assert here.ids("c") == here.ids("d")


def test_an_aborted_request_leaves_nothing(lab: Labs) -> None:
    here = lab(TEXT_ONLY, max_running=2)
    prompt = here.session.append(here.session.root, encode("Hello " * 40))
    running, waiting, third = (here.request(prompt, key, max_new_tokens=50, seed=n) for n, key in enumerate("abc"))
    here.scheduler.waiting.extend((running, waiting, third))
    nodes = len(here.session.tree)
    for _ in range(12):
        here.scheduler.step()
    assert len(running.draft) > 1
    running.aborted, third.aborted = "gone", "never began"
    waiting.draft.abort()  # as store.tick does to one that timed out
    here.scheduler.step()
    assert not here.scheduler.busy
    assert [here.told[key][-1].finish_reason for key in "abc"] == ["abort"] * 3
    assert [here.told[key][-1].reason for key in "ac"] == ["gone", "never began"]
    assert len(here.session.tree) == nodes and here.session.children(prompt) == ()
    assert here.scheduler.pool.available == here.scheduler.pool.num_pages


def test_a_request_without_pixels_fails_alone(lab: Labs, pictures: list[Picture]) -> None:
    here = lab()
    seen = here.turn(here.session.root, user_turn("And this?", pictures[1], after_reply=False))
    blind = here.turn(here.session.root, user_turn("What is it?", pictures[0], after_reply=False))
    here.store.drop_features(blind.media[0])
    failing, fine = here.request(blind, "blind"), here.request(seen, "seen")
    here.scheduler.waiting.extend((failing, fine))
    while here.scheduler.busy:
        here.scheduler.step()
    last = here.told["blind"][-1]
    assert last.finish_reason == "error" and isinstance(last.error, NeedsMedia) and last.error.items == blind.media
    assert failing.draft.how_closed == "aborted" and len(here.ids("seen")) == 8


@pytest.mark.parametrize("where", ["prefix", "pixels"])
def test_what_is_damaged_fails_those_that_need_it_alone(
    lab: Labs, pictures: list[Picture], monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    here = lab()
    seen = here.turn(here.session.root, user_turn("And this?", pictures[1], after_reply=False))
    broken = here.turn(here.session.root, user_turn("What is it?", pictures[0], after_reply=False))
    damage = CorruptTree("a byte is another")

    def raising(call: Callable[..., Any], *about: object) -> Callable[..., Any]:
        def checked(first: Any, *args: Any, **more: Any) -> Any:
            if first in about:
                raise damage
            return call(first, *args, **more)

        return checked

    if where == "prefix":
        monkeypatch.setattr("mini_scheduler.scheduler.page_hashes", raising(page_hashes, broken))
    else:
        monkeypatch.setattr(here.store, "get_features", raising(here.store.get_features, *broken.media))
    first, failing, last = here.request(seen, "first"), here.request(broken, "failing"), here.request(seen, "last")
    here.scheduler.waiting.extend((first, failing, last))
    while here.scheduler.busy:
        here.scheduler.step()
    assert here.told["failing"][-1].error is damage and failing.draft.how_closed == "aborted"
    assert len(here.ids("first")) == len(here.ids("last")) == 8


def test_a_session_that_was_closed_takes_no_reply(lab: Labs) -> None:
    here = lab(TEXT_ONLY)
    request = here.request(here.session.append(here.session.root, encode("Hi")), "a")
    here.session.close()
    here.scheduler.waiting.append(request)
    while here.scheduler.busy:
        here.scheduler.step()
    assert here.told["a"][-1].finish_reason in ("abort", "error") and here.told["a"][-1].node is None


# Ends


@pytest.mark.parametrize("reason", ["length", "token", "string"])
def test_a_reply_ends_where_it_is_told_to(lab: Labs, reason: str) -> None:
    here = lab(TEXT_ONLY)
    prompt = here.session.append(here.session.root, encode("Tell me."))
    here.run(here.request(prompt, "free", max_new_tokens=12))
    free = here.ids("free")
    text = "".join(output.text for output in here.told["free"])
    assert text == decode(free) == here.told["free"][-1].node.metadata["text"]  # type: ignore[union-attr]
    assert here.told["free"][-1].finish_reason == "length"
    if reason == "token":
        (node,) = here.run(here.request(prompt, "cut", max_new_tokens=12, stop_token_ids=[free[5]]))
        assert here.told["cut"][-1].matched == free[5] and node.finish_reason == "stop"
        assert node.token_ids.tolist() == free[: free.index(free[5]) + 1]
        assert node.metadata["text"] == decode(free[: free.index(free[5])])
    elif reason == "string":
        stop = decode(free[3:6])[1:-1]  # begins and ends inside tokens
        (node,) = here.run(here.request(prompt, "cut", max_new_tokens=12, stop=[stop]))
        assert here.told["cut"][-1].matched == stop and node.finish_reason == "stop"
        assert node.metadata["text"] == text[: text.index(stop)] == "".join(output.text for output in here.told["cut"])
        assert node.token_ids.tolist() == free[: len(node)] and stop in decode(free[: len(node)])
        assert stop not in decode(free[: len(node) - 1])
        here.run(here.request(prompt, "held", max_new_tokens=12, stop=[text[-1] + "never said"]))
        assert "".join(output.text for output in here.told["held"]) == text  # what was held back comes when it ends
        assert here.told["held"][-1].finish_reason == "length"


def test_a_retry_of_a_request_says_the_same(lab: Labs) -> None:
    """Sampled, no seed given: the key is the seed, so a repeated key commits the same node."""
    here = lab(TEXT_ONLY)
    prompt = here.session.append(here.session.root, encode("Guess."))
    first, second = (here.run(here.request(prompt, "once", temperature=1.0))[0] for _ in range(2))
    (other,) = here.run(here.request(prompt, "twice", temperature=1.0))
    assert first is second or first == second
    assert first.token_ids.tolist() != other.token_ids.tolist()


# For training


def judged(weights: dict[str, torch.Tensor], node: Node, temperature: float, ends: bool) -> NDArray[np.float64]:
    """Of a reply's tokens, the log-probabilities by transformers' model over the whole path. ``ends``: its end counts too."""
    judge = tiny_text_model(3)
    judge.load_state_dict(weights, strict=False)
    ids = torch.from_numpy(node.input_ids().astype(np.int64))
    with torch.no_grad():
        logits = judge(input_ids=ids[None]).logits[0, node.start - 1 : -1]
    allowed = torch.cat((torch.arange(TEXT), torch.tensor([IM_END] * ends, dtype=torch.int64)))
    below = logits[:, allowed].double() / temperature
    chosen = torch.searchsorted(allowed, ids[node.start :])
    chances: NDArray[np.float64] = torch.log_softmax(below, -1).gather(1, chosen[:, None])[:, 0].numpy()
    return chances


def changed(model: Model, share: float) -> dict[str, torch.Tensor]:
    """Other weights of its layers, and not of its embeddings."""
    own = {name: weight for name, weight in model._whole.state_dict().items() if "layers" in name}
    return {name: weight * (1 + share) for name, weight in own.items()}


def test_replies_for_training_say_their_log_probabilities(lab: Labs) -> None:
    """With plenty, and with chunks of prompts, preemption and forks of replies: the same numbers, which are transformers'.

    Logits are 1e-5 from transformers' at most, float32 both; the numbers are by as much over the temperature.
    """
    found = []
    for options in ({}, {"num_pages": 12, "max_batch_tokens": 16, "max_running": 5}):
        here = lab(TEXT_ONLY, **options)
        first = here.run(
            *[
                here.request(here.turn(here.session.root, turn), f"a{n}", for_training=True, temperature=0.7, ignore_eos=n % 2 > 0)
                for n, turn in enumerate(prompts(6, [None]))
            ]
        )
        cut = [here.session.truncate(node, node.start + 3) for node in first]
        second = here.run(*[here.request(node, f"b{n}", for_training=True, temperature=0.0) for n, node in enumerate(cut)])
        for nodes, temperature in ((first, 0.7), (second, 1.0)):  # of the likeliest token too there is one: at temperature 1
            for number, node in enumerate(nodes):
                values, known = here.session.token_values(node, "logprobs", node.start)
                assert known.all() and values.dtype == np.float32
                ends = temperature == 1.0 or number % 2 == 0
                assert np.abs(values - judged({}, node, temperature, ends)).max() < 1e-5 / temperature
                assert here.session.spans(node, "weight_version", node.start) == ((node.start, node.stop, 0),)
                found.append((node.id, values.tobytes()))
        assert bool(options) == bool(here.scheduler.counters.preemptions)
        assert not here.session.annotations(here.run(here.request(first[0], "c"))[0])  # nobody asked
    assert found[: len(found) // 2] == found[len(found) // 2 :]


def test_a_reply_goes_on_with_other_weights(lab: Labs, models: dict[str, Model], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token has the log-probability that the weights give it which sampled it, over a whole path of their own making."""
    own = load_model(TEXT_ONLY)
    monkeypatch.setitem(models, TEXT_ONLY, own)
    here, other = lab(TEXT_ONLY, max_running=2), changed(own, 0.1)
    prompt = here.session.append(here.session.root, encode("word " * 40))
    requests = [here.request(prompt, key, for_training=True, temperature=0.5, ignore_eos=True) for key in "abc"]
    here.scheduler.waiting.extend(requests)
    while len(requests[0].draft) < 3:
        here.scheduler.step()
    middle = [len(request.draft) for request in requests]
    assert 0 < middle[1] <= middle[0] and middle[2] == 0
    here.scheduler.load_weights(other, 7)
    assert list(here.scheduler.waiting) == requests and not here.scheduler.running  # in the order in which they came
    assert not here.scheduler.pool.find(page_hashes(prompt, "sglang", 16, salt="t"))
    nodes = here.run()
    nodes = [here.node(request) for request in requests]
    for node, at in zip(nodes, middle, strict=True):
        values, known = here.session.token_values(node, "logprobs", node.start)
        old, new = judged({}, node, 0.5, False), judged(other, node, 0.5, False)
        assert known.all() and np.abs(old - new).max() > 0.01
        assert np.abs(values - np.concatenate((old[:at], new[at:]))).max() < 1e-5 / 0.5
        spans = [(node.start, node.start + at, 0)] * (at > 0) + [(node.start + at, node.stop, 7)]
        assert here.session.spans(node, "weight_version", node.start) == tuple(spans)
    cached = here.scheduler.counters.cached_tokens
    here.run(here.request(prompt, "d"))
    assert here.scheduler.counters.cached_tokens - cached == (prompt.stop - 1) // 16 * 16  # what the new ones made is found


def test_weights_that_do_not_fit_change_nothing(lab: Labs, models: dict[str, Model], monkeypatch: pytest.MonkeyPatch) -> None:
    own = load_model(TEXT_ONLY)
    monkeypatch.setitem(models, TEXT_ONLY, own)
    here, other = lab(TEXT_ONLY), changed(own, 0.1)
    before = {name: weight.clone() for name, weight in own._whole.state_dict().items()}
    running = here.request(here.session.append(here.session.root, [1, 2]), "a")
    here.scheduler.waiting.append(running)
    here.scheduler.step()
    name = next(iter(other))
    for wrong in ({"model.other": other[name]}, {name: other[name][:1]}):
        with pytest.raises(Unsupported, match=f"no '{next(iter(wrong))}' of "):
            here.scheduler.load_weights(other | wrong, 1)
    assert own.version == 0 and here.scheduler.running == [running]
    assert all(torch.equal(weight, before[name]) for name, weight in own._whole.state_dict().items())


def test_pictures_are_encoded_again_with_other_weights(lab: Labs, pictures: list[Picture]) -> None:
    here = lab()
    prompt = here.turn(here.session.root, user_turn("What is it?", pictures[1], after_reply=False))
    for version in range(2):
        here.run(here.request(prompt, f"{version}"))
        here.scheduler.load_weights({}, 0)
        assert here.scheduler.encoder.held_bytes == 0
    assert here.scheduler.counters.encoded_items == 2


# The engine's thread


def test_the_engine_serves_many_threads_and_ends_what_runs(tmp_path: Path, models: dict[str, Model]) -> None:
    model = models[TEXT_ONLY]
    with SessionStore.open(tmp_path / "s") as store:
        session = store.create("s", scheme=model.scheme)
        engine = Engine(store, model, max_waiting=40, num_pages=40)
        engine.start()
        ends: dict[str, Output] = {}
        done = threading.Semaphore(0)

        def ask(key: str, tokens: int) -> Request:
            def tell(output: Output) -> None:
                if output.finish_reason is not None:
                    ends[key] = output
                    done.release()

            draft = session.draft(session.append(session.root, encode(f"I am {key}")), key=key)
            request = Request(draft, Sampling(max_new_tokens=tokens, temperature=0.0), tell)
            engine.submit([request])
            return request

        threads = [threading.Thread(target=ask, args=(f"t{n}", 6)) for n in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for _ in threads:
            done.acquire()
        assert {output.finish_reason for output in ends.values()} == {"length"}
        with pytest.raises(LimitExceeded, match="the KV cache holds 640"):
            ask("long", 640)
        engine.abort(ask("aborted", 500), "the client left")
        done.acquire()
        assert (ends["aborted"].finish_reason, ends["aborted"].reason) == ("abort", "the client left")
        ask("last", 500)
        engine.close()
        assert ends["last"].reason == "the server is shutting down"
        with pytest.raises(StoreClosed):
            ask("after", 1)
        usage = engine.usage()
        assert (usage.running, usage.waiting, usage.used_pages) == (0, 0, 0)


def test_a_full_queue_takes_none_of_a_batch(tmp_path: Path, models: dict[str, Model]) -> None:
    model = models[TEXT_ONLY]
    with SessionStore.open(tmp_path / "s") as store:
        session = store.create("s", scheme=model.scheme)
        engine = Engine(store, model, max_waiting=3)  # not started: everything waits
        prompt = session.append(session.root, [1, 2, 3])
        sampling = Sampling(max_new_tokens=4)
        requests = [Request(session.draft(prompt), sampling, lambda output: None) for _ in range(4)]
        with pytest.raises(QueueFull, match="and 4 would come"):
            engine.submit(requests)
        assert engine.usage().waiting == 0
        engine.submit(requests[:3])
        assert engine.usage().waiting == 3


def test_a_step_that_fails_ends_its_requests_and_no_others(
    tmp_path: Path, models: dict[str, Model], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = models[TEXT_ONLY]
    with SessionStore.open(tmp_path / "s") as store:
        session = store.create("s", scheme=model.scheme)
        engine = Engine(store, model)
        engine.start()
        ends: list[Output] = []
        done = threading.Semaphore(0)

        def tell(output: Output) -> None:
            if output.finish_reason is not None:
                ends.append(output)
                done.release()

        prompt = session.append(session.root, [1, 2, 3])
        with monkeypatch.context() as broken:

            def fail(*_: Any) -> None:
                raise RuntimeError("out of luck")

            broken.setattr(model, "forward", fail)
            engine.submit([Request(session.draft(prompt), Sampling(max_new_tokens=2), tell)])
            done.acquire()
        assert ends[0].finish_reason == "error" and isinstance(ends[0].error, EngineFault) and "RuntimeError" in str(ends[0].error)
        assert "out of luck" in caplog.text
        engine.submit([Request(session.draft(prompt), Sampling(max_new_tokens=2), tell)])
        done.acquire()
        assert ends[1].finish_reason in ("length", "stop") and engine.alive
        engine.close()
        assert session.children(prompt) == (ends[1].node,)


# The parts


class Pages(RuleBasedStateMachine):
    """A pool beside what it promises: no page in two hands unless it was found by name, nothing in use given away."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(6, 4)
        self.tables: list[list[int]] = []
        self.contents: dict[int, bytes] = {}  # named pages, as they were last written
        self.names = 0

    @rule()
    def take(self) -> None:
        in_use = {page for table in self.tables for page in table}
        if len(in_use) == 6:
            with pytest.raises(LimitExceeded):
                self.pool.take()
            return
        page = self.pool.take()
        assert page not in in_use
        self.contents.pop(page, None)
        self.tables.append([page])

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), again=st.booleans())
    def name(self, data: st.DataObject, again: bool) -> None:
        table = data.draw(st.sampled_from(self.tables))
        name = data.draw(st.sampled_from(sorted(self.contents.values()))) if again and self.contents else b"%d" % self.names
        self.names += 1
        fresh = table[-1] not in self.contents and name not in self.contents.values()
        self.pool.name(table[-1], name)
        if fresh:
            self.contents[table[-1]] = name

    @precondition(lambda self: self.contents)
    @rule(data=st.data())
    def find(self, data: st.DataObject) -> None:
        names = data.draw(st.lists(st.sampled_from([*sorted(self.contents.values()), b"unknown"]), max_size=3, unique=True))
        found = self.pool.find(names)
        expected = names[: names.index(b"unknown")] if b"unknown" in names else names
        assert [self.contents[page] for page in found] == expected
        if found:
            self.tables.append(found)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.pool.release(self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1))))

    @rule()
    def forget(self) -> None:
        self.pool.forget()
        self.contents.clear()

    @invariant()
    def counts(self) -> None:
        in_use = {page for table in self.tables for page in table}
        assert self.pool.available == 6 - len(in_use)
        assert self.pool.cached == len(self.contents.keys() - in_use)


TestPages = Pages.TestCase


def test_pages_go_from_the_end_of_a_path_and_the_oldest_first() -> None:
    pool = PagePool(4, 16)
    for table in ("ab", "cd"):
        pages = [pool.take(), pool.take()]
        for page, name in zip(pages, table, strict=True):
            pool.name(page, name.encode())
        pool.release(pages)
    pool.release(pool.find([b"a"]))  # used again
    taken = [pool.take() for _ in range(2)]
    assert len(taken) == 2 and not pool.find([b"b"]) and not pool.find([b"d"])
    assert len(pool.find([b"a"])) == len(pool.find([b"c"])) == 1
    for wrong in ((0, 1), (1, 0)):
        with pytest.raises(OutOfRange):
            PagePool(*wrong)


def test_the_encoder_drops_what_was_used_longest_ago_and_makes_it_again() -> None:
    made: list[MediaItem] = []

    def encode_item(item: MediaItem) -> torch.Tensor:
        made.append(item)
        return torch.full((4, 8), float(len(made)))

    cache = EncoderCache(encode_item, budget_bytes=2 * 4 * 8 * 4)
    one, two, three = (MediaItem("image", media_identity("image", bytes([n])), [(0, 4)], grid_thw=(1, 4, 4)) for n in range(3))
    held = cache.rows(one, "s")
    cache.rows(two, "s")
    assert cache.rows(one, "s") is held
    cache.rows(three, "s")
    assert cache.held_bytes == 2 * 4 * 8 * 4 and cache.rows(one, "s") is held
    cache.rows(two, "s")
    assert made == [one, two, three, two]
    cache.rows(one, "other")
    assert made[-1] == one and torch.equal(held, torch.ones(4, 8))


@given(
    st.lists(st.one_of(st.integers(0, TEXT - 1), st.sampled_from([0, 1, 97, 198, 220, 30543, 9904]), st.just(IM_END)), max_size=30),
    st.lists(st.text("ab !\n·€", min_size=1, max_size=4), max_size=3),
)
def test_text_comes_out_whole_up_to_the_stop(token_ids: list[int], stops: list[str]) -> None:
    grows = Detokenizer(tuple(stops))
    given_out = "".join(map(grows.push, token_ids))
    assert not any(stop in given_out for stop in stops)
    given_out += grows.finish()
    whole = decode(token_ids)
    ends = [whole.find(stop) for stop in stops if stop in whole]
    assert given_out == grows.text == (whole[: min(ends)] if ends else whole)
    assert (grows.matched is not None) == bool(ends)


@pytest.mark.parametrize("text", ["plain", "<|im_end|> is text", "a<|image_pad|>b", "é😀\n"])
def test_markers_are_control_tokens_only_where_they_are_meant(text: str) -> None:
    assert decode(encode(text)) == text and all(token < TEXT for token in encode(text))
    assert any(token >= TEXT for token in encode(text, special=True)) == ("<|" in text)


class FakeDraft:
    """As much of a draft as sampling looks at."""

    def __init__(self, key: str, length: int) -> None:
        self.key, self.length = key, length

    def __len__(self) -> int:
        return self.length


def sampled(logits: torch.Tensor, sampling: Sampling, key: str = "k", length: int = 0) -> int:
    request = Request.__new__(Request)
    draft: Any = FakeDraft(key, length)
    request.draft, request.sampling = draft, sampling
    return sample(logits[None], [request])[0]


def test_tokens_are_drawn_as_often_as_they_are_likely() -> None:
    logits = torch.full((VOCABULARY,), -torch.inf)
    likely = {7: 0.5, 1000: 0.3, TEXT - 1: 0.15, IM_END: 0.05}
    for token, chance in likely.items():
        logits[token] = math.log(chance) * 2  # at temperature 2
    count = 400
    drawn = [sampled(logits, Sampling(temperature=2.0), length=n) for n in range(count)]
    for token, chance in likely.items():
        assert abs(drawn.count(token) / count - chance) < 4 * math.sqrt(chance * (1 - chance) / count)
    assert set(drawn) == likely.keys()
    narrow = Sampling(temperature=2.0, top_p=0.79)
    assert {sampled(logits, narrow, length=n) for n in range(100)} == {7, 1000}
    assert {sampled(logits, Sampling(temperature=2.0, top_k=3), length=n) for n in range(200)} == {7, 1000, TEXT - 1}
    assert sampled(logits, Sampling(temperature=0.0)) == sampled(logits, Sampling(temperature=1e-310)) == 7
    logits[IM_END] = 9.0
    assert sampled(logits, Sampling(temperature=0.0)) == IM_END
    assert sampled(logits, Sampling(temperature=0.0, ignore_eos=True)) == 7
    logits[TEXT], logits[VOCABULARY - 1] = 50.0, 60.0  # control tokens and unused rows are never picked
    assert sampled(logits, Sampling(temperature=0.0)) == IM_END


def test_log_probabilities_are_of_what_may_be_picked_at_the_temperature() -> None:
    logits = torch.full((VOCABULARY,), -torch.inf)
    logits[7], logits[IM_END], logits[TEXT] = 0.0, math.log(3), 50.0

    def said(token: int, **sampling: Any) -> float:
        request = Request.__new__(Request)
        request.sampling = Sampling(**sampling)
        return math.exp(logprob(logits, request, token))

    assert said(7) == pytest.approx(1 / 4) and said(IM_END) == pytest.approx(3 / 4)
    assert said(7, temperature=0.5) == pytest.approx(1 / 10) and said(IM_END, temperature=0.5) == pytest.approx(9 / 10)
    assert said(7, temperature=0.0) == said(7, top_k=1) == said(7)
    assert said(7, ignore_eos=True) == 1.0


def test_a_draw_depends_on_seed_and_place_alone() -> None:
    logits = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(1))
    one = [sampled(logits, Sampling(seed=5), key=str(n), length=n) for n in range(8)]
    assert one == [sampled(logits, Sampling(seed=5), length=n) for n in range(8)] and len(set(one)) > 4
    assert one != [sampled(logits, Sampling(seed=6), length=n) for n in range(8)]
    assert sampled(logits, Sampling(), key="a") != sampled(logits, Sampling(), key="b")


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_new_tokens": 0},
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_k": -2},
        {"seed": 2**64},
        {"stop": [""]},
        {"stop": ["x" * 257]},
        {"stop": ["x"] * 17},
        {"stop_token_ids": range(17)},
    ],
)
def test_sampling_names_what_is_out_of_range(wrong: dict[str, Any]) -> None:
    with pytest.raises((OutOfRange, LimitExceeded)) as caught:
        Sampling(**wrong)
    assert hasattr(caught.value, "limit")


def test_capacities_that_cannot_work_are_refused(lab: Labs) -> None:
    with pytest.raises(LimitExceeded, match="9 requests"):
        lab(TEXT_ONLY, max_running=9, max_batch_tokens=8)
