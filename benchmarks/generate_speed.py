"""Generation beside `transformers.generate`: one model, the same weights, the same prompts, in one run.

    python benchmarks/generate_speed.py [--batch 1 8 32] [--new 64] [--speculate auto]

A batch is requests with mixed lengths of prompt and answer. Both sides are given all of them at once and are timed
until the last answer is there; only tokens that were asked for count. transformers pads the prompts on the left and
runs until the longest answer is done. Greedy, float32, equal tokens are checked. With `--speculate none` nothing is
guessed from earlier text; a model with random weights repeats itself: guesses are right more often than on text.
"""

from __future__ import annotations

import argparse
import random
import time

import torch
import transformers

from isotron.core.checkpoint.weights import load_weights
from isotron.core.mesh import Mesh
from isotron.core.models.llama_config import LlamaConfig
from isotron.core.parallel.model import ParallelModel
from isotron.core.parallel.plan import Layout
from isotron.inference.config import Ending, EngineConfig, Wish, inference_layout
from isotron.inference.engine import Engine

LAYERS, HIDDEN, HEADS, FFN, VOCAB, LONGEST = 8, 512, 8, 1344, 32000, 1024
Request = tuple[list[int], int]


def requests(count: int, new: int) -> list[Request]:
    """Prompts of 16 to 256 tokens, answers of new/4 to 2 x new; a single request has the means of both."""
    chance = random.Random(7)
    if count == 1:
        return [([chance.randrange(VOCAB) for _ in range(128)], new)]
    sizes = [(chance.randint(16, 256), chance.randint(max(1, new // 4), 2 * new)) for _ in range(count)]
    return [([chance.randrange(VOCAB) for _ in range(n)], m) for n, m in sizes]


def models(speculate: str = "auto") -> tuple[torch.nn.Module, Engine]:
    """The same random weights on both sides."""
    torch.manual_seed(0)
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=FFN, num_hidden_layers=LAYERS,
            num_attention_heads=HEADS, num_key_value_heads=HEADS, max_position_embeddings=LONGEST,
        )
    ).eval()  # fmt: skip
    theirs.get_input_embeddings().padding_idx = None
    config = LlamaConfig(LAYERS, HIDDEN, HEADS, HEADS, 0, FFN, VOCAB, LONGEST, norm_epsilon=1e-6)
    model = ParallelModel(config, inference_layout(Layout()), Mesh(), torch.float32, torch.device("cpu"), 1)
    load_weights(model, Weights(theirs.state_dict()))
    return theirs, Engine(model, None, EngineConfig(rows=32, speculate=speculate))


class Weights:
    """A source of weights from a state dict of transformers."""

    def __init__(self, state: dict[str, torch.Tensor]) -> None:
        self.tensors = {
            "embed.weight": state["model.embed_tokens.weight"],
            "norm.weight": state["model.norm.weight"],
            "head.weight": state["lm_head.weight"],
        }
        for i in range(LAYERS):
            of, to = f"model.layers.{i}.", f"layers.{i}."
            parts = {
                "attention.qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
                "attention.out": ["self_attn.o_proj"],
                "mlp.gate_up": ["mlp.gate_proj", "mlp.up_proj"],
                "mlp.down": ["mlp.down_proj"],
                "attention_norm": ["input_layernorm"],
                "mlp_norm": ["post_attention_layernorm"],
            }
            for name, sources in parts.items():
                self.tensors[f"{to}{name}.weight"] = torch.cat([state[f"{of}{s}.weight"] for s in sources])

    def names(self) -> list[str]:
        return list(self.tensors)

    def info(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        return self.tensors[name].dtype, tuple(self.tensors[name].shape)

    def read(self, name: str, box, out: torch.Tensor) -> None:
        out.copy_(self.tensors[name][box.slices()])


def run_theirs(model, batch: list[Request]) -> list[list[int]]:
    width, new = max(len(p) for p, _ in batch), max(m for _, m in batch)
    ids = torch.tensor([[0] * (width - len(p)) + p for p, _ in batch])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p, _ in batch])
    out = model.generate(
        ids, attention_mask=mask, max_new_tokens=new, do_sample=False, pad_token_id=0, eos_token_id=None
    )
    return [row[width : width + m].tolist() for row, (_, m) in zip(out, batch, strict=True)]


def run_ours(engine: Engine, batch: list[Request]) -> list[list[int]]:
    with engine.opened(sum(len(p) + m + engine.config.page for p, m in batch)):
        rows = [engine.add(p, Wish(ending=Ending(m), logprobs=False), i)[0] for i, (p, m) in enumerate(batch)]
        while not engine.idle:
            engine.step()
    return [row.new for row in rows]


def seconds(run, *args) -> tuple[float, list[list[int]]]:
    start = time.perf_counter()
    out = run(*args)
    return time.perf_counter() - start, out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2, help="the faster of so many, taken in turns")
    parser.add_argument("--speculate", choices=("auto", "none", "ngram"), default="auto", help="the same tokens")
    given = parser.parse_args()
    theirs, engine = models(given.speculate)
    print(f"{LAYERS} layers, hidden {HIDDEN}, vocabulary {VOCAB}, float32, {torch.get_num_threads()} thread(s)")
    for count in given.batch:
        batch = requests(count, given.new)
        tokens = sum(m for _, m in batch)
        run_ours(engine, batch[:1]), run_theirs(theirs, batch[:1])
        spent: list[list[float]] = [[], []]
        answers: list[list[list[int]]] = [[], []]
        for _ in range(given.rounds):
            for i, (run, who) in enumerate(((run_theirs, theirs), (run_ours, engine))):
                once, answers[i] = seconds(run, who, batch)
                spent[i].append(once)
        same = sum(a == b for a, b in zip(*answers, strict=True))
        slow, fast = min(spent[0]), min(spent[1])
        print(
            f"batch {count:>2}: transformers {tokens / slow:7.1f} tokens/s, isotron {tokens / fast:7.1f} tokens/s: "
            f"{slow / fast:.2f}x; {same} of {count} answers equal",
            flush=True,
        )


if __name__ == "__main__":
    main()
