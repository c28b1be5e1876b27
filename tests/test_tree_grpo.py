"""examples/tree_grpo.py: the reward rises, what is learnt is what was sampled, and no kill changes a bit or loses a rollout."""

from __future__ import annotations

import io
import os
import random
import signal
from collections.abc import Iterator, Sequence
from hashlib import sha256
from itertools import groupby
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
import tree_grpo
from mini_scheduler.pages import PagePool
from mini_scheduler.scheduler import Scheduler
from qwen_reference import TEXT

from engine_bridge import pack_rows, pack_tree
from sessiontree import Annotation, Draft, Node, Session, SessionStore, Unsupported
from sessiontree.rollouts import rollouts

SEED, STEPS = 3, 2
ORDER = "annotate", "flush", "learn", "replace"  # of a step


@pytest.fixture(scope="module", autouse=True)
def small() -> Iterator[None]:
    """On one thread, as the example runs; and fewer samples than it takes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tree_grpo, "SAMPLES", 3)
        yield
    torch.set_num_threads(threads)


@attrs.define
class Moments:
    """What a run does, one name after the other: the beginning and the end of some calls, and a checkpoint half written.

    ``die``: ends the process by SIGKILL at the so-many-th moment, or of those by a name. ``known``: keys that may not be sampled.
    """

    die: tuple[str | None, int] = (None, 0)
    known: frozenset[str] = frozenset()
    seen: list[str] = attrs.field(factory=list)
    drafted: list[str] = attrs.field(factory=list)

    def moment(self, name: str) -> None:
        self.seen.append(name)
        only, number = self.die
        if number and (only or name) == name and (self.seen.count(name) if only else len(self.seen)) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    def around(self, patch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        inner = getattr(owner, name)

        def told(*arguments: Any, **named: Any) -> Any:
            self.moment(f"before {name}")
            result = inner(*arguments, **named)
            self.moment(name)
            return result

        patch.setattr(owner, name, told)

    def run(self, directory: Path, steps: int = STEPS) -> list[float]:
        draft, save = Session.draft, torch.save

        def drafted(session: Session, parent: Node, *, key: str) -> Draft:
            assert key not in self.known, f"{key} is sampled twice"
            self.drafted.append(key)
            return draft(session, parent, key=key)

        def torn(saved: object, file: io.BufferedWriter) -> None:
            whole = io.BytesIO()
            save(saved, whole)
            half = len(whole.getvalue()) // 2
            file.write(whole.getvalue()[:half])
            file.flush()
            self.moment("half a checkpoint")
            file.write(whole.getvalue()[half:])

        with pytest.MonkeyPatch.context() as patch:
            for owner, name in (
                (Scheduler, "step"),
                (Draft, "commit"),
                (Session, "truncate"),
                (Session, "annotate"),
                (SessionStore, "flush"),
                (tree_grpo.Trainer, "learn"),
                (Path, "replace"),
            ):
                self.around(patch, owner, name)
            patch.setattr(Session, "draft", drafted)
            patch.setattr(torch, "save", torn)
            return tree_grpo.run(directory, steps, SEED)


@attrs.define
class Left:
    """What a run leaves: by session the nodes, by id, with all that is said of them; and a digest of weights and optimizer."""

    nodes: dict[str, dict[bytes, dict[str, Annotation]]]
    keys: frozenset[str]
    learned: str

    @classmethod
    def by(cls, directory: Path) -> Left:
        nodes, keys, digest = {}, set(), sha256()
        if (directory / "store").exists():
            with SessionStore.open(directory / "store", read_only=True) as store:
                for name in store.sessions():
                    tree = store.tree(name)
                    nodes[name] = {node.id: dict(tree.annotations(node)) for node in tree}
                    keys |= {node.key for node in tree if node.origin == "generated" and node.key is not None}
        if (directory / "trainer.pt").exists():
            saved = torch.load(directory / "trainer.pt")
            states = [state for _, state in sorted(saved["optimizer"]["state"].items())]
            for values in (saved["weights"], *states):
                for name, value in values.items():
                    digest.update(name.encode() + value.numpy().tobytes())
        return cls(nodes, frozenset(keys), digest.hexdigest())


def killed(directory: Path, name: str | None, number: int, known: frozenset[str] = frozenset(), steps: int = STEPS) -> bool:
    """Whether a run in a child of ours was killed at a moment; False: it was done before."""
    child = os.fork()
    if child == 0:
        try:
            Moments((name, number), known).run(directory, steps)
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, -signal.SIGKILL), code
    return code != 0


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, small: None) -> tuple[Path, Moments]:
    """The directory of a run that nobody killed, and what it did."""
    directory, moments = tmp_path_factory.mktemp("whole"), Moments()
    moments.run(directory)
    return directory, moments


def test_a_step_is_on_disk_before_it_is_learnt_from(whole: tuple[Path, Moments]) -> None:
    order = [name for name, _ in groupby(name for name in whole[1].seen if name in ORDER)]
    assert order == list(ORDER) * STEPS
    assert len(whole[1].drafted) == len(set(whole[1].drafted)) == STEPS * 2 * 3 * 3


KILLS = [
    ("commit", 4),  # some replies are there, others are not
    ("step", 3),  # in the middle of replies
    ("before commit", 4),  # in the middle of the endings
    ("annotate", 9),
    ("flush", 1),
    ("half a checkpoint", 1),
    ("before replace", 1),
    ("replace", 1),  # learnt and saved, and nothing of the next step begun
    ("before learn", 1),
]


def test_killed_again_and_again_it_ends_as_if_never_killed(whole: tuple[Path, Moments], tmp_path: Path) -> None:
    directory = tmp_path / "killed"
    end, acknowledged = Left.by(whole[0]), 0
    for name, number in KILLS:
        before = Left.by(directory)
        assert killed(directory, name, number, before.keys)
        now = Left.by(directory)
        assert before.keys <= now.keys <= end.keys
        if name in ("flush", "replace", "half a checkpoint", "before replace", "before learn"):  # a step was flushed
            acknowledged = 1 + (name == "before learn")
        for step in range(acknowledged):
            assert now.nodes[f"step {step}"] == end.nodes[f"step {step}"]
    last = Moments(known=Left.by(directory).keys)
    last.run(directory)
    assert not last.drafted  # all was sampled by then
    assert Left.by(directory) == end


@pytest.mark.soak
def test_killed_anywhere_it_ends_as_if_never_killed(whole: tuple[Path, Moments], tmp_path: Path) -> None:
    """Killed at a random moment in each of its lives, 20 runs."""
    rng = random.Random(os.environ.get("PYTEST_XDIST_TESTRUNUID", "kills"))
    end, moments = Left.by(whole[0]), len(whole[1].seen)
    for run in range(20):
        directory, lives = tmp_path / str(run), [number := rng.randint(1, moments)]
        while killed(directory, None, number, Left.by(directory).keys):
            lives.append(number := rng.randint(1, moments))
        assert Left.by(directory) == end, lives


def test_the_order_in_which_rollouts_come_changes_nothing(
    whole: tuple[Path, Moments], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample = tree_grpo.sample

    def reversed_sample(scheduler: Scheduler, session: Session, asked: Sequence[tuple[Node, str, int]]) -> list[Node]:
        return sample(scheduler, session, asked[::-1])[::-1]

    monkeypatch.setattr(tree_grpo, "sample", reversed_sample)
    tree_grpo.run(tmp_path / "run", STEPS, SEED)
    with SessionStore.open(tmp_path / "run/store") as store, SessionStore.open(whole[0] / "store", read_only=True) as other:
        assert [node.id for node in store.get("step 0").tree] != [node.id for node in other.get("step 0").tree]
    assert Left.by(tmp_path / "run") == Left.by(whole[0])


def test_a_run_that_is_done_does_nothing_more(whole: tuple[Path, Moments]) -> None:
    end, again = Left.by(whole[0]), Moments()
    assert len(again.run(whole[0])) == STEPS
    assert Left.by(whole[0]) == end and not {"step", "learn", "annotate"}.intersection(again.seen)


def test_kv_of_other_weights_would_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PagePool, "forget", lambda pool: None)
    with pytest.raises(RuntimeError, match="from those of the sampler"):
        tree_grpo.run(tmp_path / "run", STEPS, SEED)


def test_a_token_without_advantage_is_not_learnt_from(whole: tuple[Path, Moments]) -> None:
    with SessionStore.open(whole[0] / "store") as store:
        session = store.create("unjudged", scheme="text@hf5")
        with session.draft(session.append(session.root, [1])) as draft:
            draft.extend([2, 3])
            draft.commit()
        with pytest.raises(Unsupported, match="no 'advantage'"):
            pack_tree(list(rollouts(session)), factors=("advantage",))
        store.drop("unjudged")


def test_the_packed_step_is_its_rollouts(whole: tuple[Path, Moments]) -> None:
    """Loss and gradients of the pack are those of the rows, and a token has the mean advantage of the rollouts through it.

    In float64, but for transformers' norms, which are computed in float32 whatever the weights are: hence 1e-6 of gradients.
    """
    trainer = tree_grpo.Trainer(whole[0] / "none", SEED)
    model = trainer.model.double()
    with SessionStore.open(whole[0] / "store", read_only=True) as store:
        session = store.get("step 0")
        found = tree_grpo.in_order(rollouts(session))
        named: dict[str, Any] = {"factors": ("advantage",), "dtype": torch.float64}
        (pack,) = packs = pack_tree(found, **named)
        rows = pack_rows(found, **named)
        assert len(found) == 2 * 3 * 3 and packs.dedupe_ratio > 2
        sums, counts = torch.zeros(len(pack)).double(), torch.zeros(len(pack)).double()
        for number, node in enumerate(pack.rows):
            (rollout,) = (each for each in found if each.node == node)
            rewards = np.array([tree_grpo.reward_of(each) for each in found if each.prompt == rollout.prompt])
            assert rollout.reward == tree_grpo.reward_of(rollout) == np.mean(node.input_ids(rollout.prompt.stop) % 2 == 0)
            at = pack.row_indices(number)[rollout.prompt.stop :]
            sums[at] += (rollout.reward - rewards.mean()) / (rewards.std() + 1e-6)
            counts[at] += 1
        target = pack.edges.target
        assert torch.equal(target, counts.nonzero()[:, 0]) and counts.max() == 3
        assert (pack.edges.weight - sums[target] / counts[target]).abs().max() < 1e-12

        sampled, _ = pack.token_values("logprobs")
        losses = [(pack.edges.weight * torch.exp(trainer.logprobs(pack) - sampled[target])).sum()]
        logits = model(input_ids=rows.input_ids, position_ids=rows.position_ids, attention_mask=rows.attention_mask).logits
        logprobs = torch.log_softmax(logits[..., :TEXT] / tree_grpo.TEMPERATURE, -1)
        labels = rows.shift_labels
        chosen = labels >= 0
        recorded = torch.zeros(labels.shape)
        for number, node in enumerate(rows.rows):
            values = torch.from_numpy(session.token_values(node, "logprobs").values)
            recorded[number, : node.stop - 1] = values[1:]
        of_rows = logprobs[chosen].gather(1, labels[chosen][:, None])[:, 0]
        losses.append((rows.weights[chosen] * torch.exp(of_rows - recorded[chosen])).sum())
        gradients = [torch.autograd.grad(loss, list(trainer.learned.values())) for loss in losses]
        assert abs(losses[0] - losses[1]) <= 1e-9 * pack.edges.weight.abs().sum()  # advantages cancel each other in it
        for one, other in zip(*gradients, strict=True):
            assert (one - other).norm() <= 1e-6 * other.norm()


def rises(directory: Path, seed: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tree_grpo, "SAMPLES", 5)
        assert tree_grpo.main(["--store", str(directory), "--seed", str(seed)]) == 0
    with SessionStore.open(directory / f"seed-{seed}" / "store", read_only=True) as store:
        rewards = [tree_grpo.mean_reward(store.get(f"step {step}")) for step in range(10)]
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.15


def test_the_reward_rises(tmp_path: Path) -> None:
    rises(tmp_path, SEED)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(4, 9))
def test_the_reward_rises_from_any_weights(tmp_path: Path, seed: int) -> None:
    rises(tmp_path, seed)
