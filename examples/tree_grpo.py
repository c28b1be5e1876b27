"""Reinforcement learning on trees of rollouts, whole and on the CPU: GRPO where samples share what they share.

In each step the mini scheduler samples replies to a few prompts, forks each of them in its middle and samples other endings. Each
path to a leaf is a rollout; its reward is the share of even ids among its sampled tokens. A token's advantage is the mean over the
rollouts that go through it, so what rollouts share is judged by all of them. The tree is packed, each sampled token is trained on
once, and the scheduler goes on with the new weights.

Everything that happened lies in the store: tokens, the log-probabilities they were sampled with, the versions of the weights,
rewards and advantages. Kill it at any time and start it again: it goes on where it was, samples nothing again that is in the store,
and ends with the same weights as a run that was never killed, bit for bit. That rests on three things: a reply follows from its
prompt, its key and the weights, whatever runs beside it; a step's rollouts are on disk before they are learnt from; and they are
learnt from in the order of their ids, not in that in which they came.

    python examples/tree_grpo.py --store PATH
"""

import argparse
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import torch
from mini_scheduler.model import load_model, tiny_text_model
from mini_scheduler.requests import Output, Request, Sampling
from mini_scheduler.scheduler import Scheduler
from numpy.typing import NDArray
from qwen_reference import TEXT

from engine_bridge import TreePack, pack_tree
from sessiontree import Node, Session, SessionStore
from sessiontree.annotations import ADVANTAGE, LOGPROBS, REWARD
from sessiontree.rollouts import Rollout, groups, rollouts

PROMPTS: Final = ((11, 12, 13, 14, 15), (2000, 2001, 2002, 2003))
SAMPLES: Final = 5  # replies to a prompt
ENDINGS: Final = 2  # others, for each reply
LENGTH: Final = 8  # tokens of a reply
MIDDLE: Final = 4  # where it is forked
TEMPERATURE: Final = 0.2
LEARNING_RATE: Final = 0.02
TOLERANCE: Final = 2e-5 / TEMPERATURE  # of log-probabilities: float32 logits of the same path, computed in two ways


# --- the trainer ------------------------------------------------------------------------------------------------------
class Trainer:
    """The model that learns, and its optimizer. Embeddings stay as they are, so that a checkpoint is small."""

    def __init__(self, checkpoint: Path, seed: int) -> None:
        self.model = tiny_text_model(seed)
        self.learned = {name: each for name, each in self.model.named_parameters() if "embed" not in name and "lm_head" not in name}
        self.model.requires_grad_(False)
        for parameter in self.learned.values():
            parameter.requires_grad_()
        self.optimizer = torch.optim.Adam(self.learned.values(), LEARNING_RATE)
        self.step = 0  # how many there were: the version of the weights
        self.checkpoint = checkpoint
        if checkpoint.exists():
            saved = torch.load(checkpoint)
            self.model.load_state_dict(saved["weights"], strict=False)
            self.optimizer.load_state_dict(saved["optimizer"])
            self.step = saved["step"]

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: parameter.detach() for name, parameter in self.learned.items()}

    def logprobs(self, pack: TreePack) -> torch.Tensor:
        """Of each edge's target: (edges,)."""
        hidden = self.model.model(
            input_ids=pack.input_ids[None], position_ids=pack.position_ids, attention_mask=pack.dense_mask()[None, None]
        ).last_hidden_state[0]
        logits = self.model.lm_head(hidden[pack.edges.source])[:, :TEXT] / TEMPERATURE
        return torch.log_softmax(logits, -1).gather(1, pack.input_ids[pack.edges.target, None])[:, 0]

    def learn(self, pack: TreePack) -> float:
        """One update. Returns how far the log-probabilities are from those that the tokens were sampled with, at most."""
        values, known = pack.token_values(LOGPROBS)
        sampled = values[pack.edges.target]
        logprobs = self.logprobs(pack)
        off = float((logprobs.detach() - sampled).abs().max())
        if not known[pack.edges.target].all() or not off < TOLERANCE:
            raise RuntimeError(f"some log-probabilities are {off:.1e} from those of the sampler, or are lacking")
        loss = -(pack.edges.weight * torch.exp(logprobs - sampled)).mean()
        self.optimizer.zero_grad()
        torch.autograd.backward(loss)
        self.optimizer.step()
        self.step += 1
        return off

    def save(self) -> None:
        """All of it or nothing. Should the machine lose it again, the last step is learnt once more, to the same end."""
        new = self.checkpoint.with_suffix(".new")
        with new.open("wb") as file:
            torch.save({"weights": self.weights(), "optimizer": self.optimizer.state_dict(), "step": self.step}, file)
            file.flush()
            os.fsync(file.fileno())
        new.replace(self.checkpoint)


# --- the rollouts -----------------------------------------------------------------------------------------------------
def sample(scheduler: Scheduler, session: Session, asked: Sequence[tuple[Node, str, int]]) -> list[Node]:
    """A reply for each (prompt, key, number of tokens), in that order; only those are sampled that the session has not."""
    replies = {child.key: child for prompt, _, _ in asked for child in session.children(prompt)}
    told: list[Output] = []
    for prompt, key, length in asked:
        if key not in replies:
            sampling = Sampling(max_new_tokens=length, temperature=TEMPERATURE, ignore_eos=True)
            scheduler.waiting.append(Request(session.draft(prompt, key=key), sampling, told.append, for_training=True))
    while scheduler.busy:
        scheduler.step()
    for output in told:
        if output.error is not None:
            raise output.error
        if output.node is not None:
            replies[output.node.key] = output.node
    return [replies[key] for _, key, _ in asked]


def roll_out(scheduler: Scheduler, session: Session) -> None:
    """All rollouts of a step, as far as they are not there already. Keys say what was asked, and tokens are drawn by them."""
    prompts = [session.append(session.root, prompt) for prompt in PROMPTS]
    keys = [(prompt, f"{session.id}/{at}/{number}") for at, prompt in enumerate(prompts) for number in range(SAMPLES)]
    replies = sample(scheduler, session, [(prompt, key, LENGTH) for prompt, key in keys])
    middles = [(session.truncate(reply, reply.start + MIDDLE), key) for reply, (_, key) in zip(replies, keys, strict=True)]
    sample(scheduler, session, [(node, f"{key}/{n}", LENGTH - MIDDLE) for node, key in middles for n in range(ENDINGS)])


def reward_of(rollout: Rollout) -> float:
    """The share of even ids among the sampled tokens."""
    ids = np.concatenate([node.token_ids for node in rollout.completions])
    return float(np.mean(ids % 2 == 0))


def in_order(found: Iterable[Rollout]) -> list[Rollout]:
    """The same after any kill: sums of floats depend on it."""
    return sorted(found, key=lambda rollout: rollout.node.id)


def judge(session: Session) -> None:
    """Give rollouts their rewards, and sampled tokens their advantages."""
    for group in groups(session):
        members = in_order(group.rollouts)
        rewards = np.array([reward_of(rollout) for rollout in members])
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        through: dict[Node, NDArray[np.float64]] = {}  # by node, for each of its tokens: the rollouts' advantages, and their number
        for rollout, reward, advantage in zip(members, rewards.tolist(), advantages.tolist(), strict=True):
            session.annotate(rollout.node, {REWARD: reward})
            for node in rollout.completions:
                (whole,) = [session.node(link.node_id) for link in node.links if link.kind == "prefix_of"] or [node]
                sums = through.setdefault(whole, np.zeros((2, len(whole))))
                sums[:, : len(node)] += [[advantage], [1]]
        for node, (total, number) in through.items():
            session.annotate(node, {ADVANTAGE: total / number})


# --- step by step -----------------------------------------------------------------------------------------------------
def run(directory: Path, steps: int, seed: int) -> list[float]:
    """Go on until there were so many steps. The mean reward of each of them, as the store has it."""
    directory.mkdir(parents=True, exist_ok=True)
    trainer, model = Trainer(directory / "trainer.pt", seed), load_model("tiny-qwen2", seed)
    with SessionStore.open(directory / "store") as store:
        scheduler = Scheduler(store, model, page_size=4)
        while trainer.step < steps:
            scheduler.load_weights(trainer.weights(), trainer.step)
            name = f"step {trainer.step}"
            known = name in store.sessions()
            session = store.get(name) if known else store.create(name, scheme=model.scheme, model_fingerprint=model.fingerprint)
            roll_out(scheduler, session)
            judge(session)
            (pack,) = packs = pack_tree(in_order(rollouts(session)), factors=(ADVANTAGE,))
            store.flush()
            off = trainer.learn(pack)
            trainer.save()
            saved = f"{packs.row_tokens} tokens of {len(packs.rows)} rollouts packed as {packs.packed_tokens}"
            print(f"{name}: reward {mean_reward(session):.3f}; {saved}; log-probabilities within {off:.0e}", flush=True)
            session.close()
        return [mean_reward(store.get(f"step {step}")) for step in range(steps)]


def mean_reward(session: Session) -> float:
    return float(np.mean([rollout.reward for rollout in rollouts(session)]))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="GRPO on trees of rollouts, with a tiny model, on the CPU.")
    parser.add_argument("--store", type=Path, required=True, help="directory of rollouts and weights; run again, it goes on there")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--seed", type=int, default=3, help="of the first weights; each has a directory of its own")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)  # more would only wait for each other on so small a model
    rewards = run(options.store / f"seed-{options.seed}", options.steps, options.seed)
    print(f"The mean reward went from {rewards[0]:.3f} to {rewards[-1]:.3f}.")
    return 0 if rewards[-1] > rewards[0] else 1


if __name__ == "__main__":
    sys.exit(main())
