"""Engines with random weights that are the same in every layout, and what tests ask of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from isotron.config.schema import RunConfig, changed, to_dict
from isotron.core.batch import Batch
from isotron.core.checkpoint.load import Source
from isotron.core.checkpoint.ranks import SingleRank
from isotron.core.checkpoint.save import Saved, save_checkpoint
from isotron.core.checkpoint.weights import load_weights
from isotron.core.mesh import Mesh
from isotron.core.models.deepseek_v3_config import DeepseekV3Config
from isotron.core.models.gpt_config import GPTConfig
from isotron.core.models.llama_config import LlamaConfig
from isotron.core.parallel.model import ParallelModel
from isotron.core.parallel.plan import Layout
from isotron.hub.reader import HFSource
from isotron.inference.beam import search
from isotron.inference.config import Beams, Ending, EngineConfig, Sampling, Wish, inference_layout
from isotron.inference.engine import Engine, Generated
from isotron.tokenizers.null import NullTokenizer
from isotron.train.verify import randomise
from tests import hf_twins

# dropout must be off in generation, so it is on here; 5 blocks do not divide by 2 or 4; 131 is padded in every layout
MODELS = {
    "gpt": GPTConfig(5, 32, 4, vocab_size=131, max_position_embeddings=32),
    "llama": LlamaConfig(5, 32, 4, 2, 16, 48, 131, 32, hidden_dropout=0.1),
    "llama-tied": LlamaConfig(4, 32, 4, 2, 0, 48, 131, 32, tie_embeddings=True),
    "mtp": DeepseekV3Config(
        3,
        32,
        4,
        4,
        0,
        48,
        131,
        64,
        num_experts=4,
        moe_router_topk=2,
        mtp_num_layers=2,
        q_lora_rank=12,
        kv_lora_rank=8,
        qk_head_dim=8,
        qk_pos_emb_head_dim=4,
        v_head_dim=6,
    ),
}
PROMPTS = [[5, 17, 99, 3, 42, 8, 130], [7], [60, 61, 62], [128, 0]]


def make_model(name: str, dtype: str = "float64", **layout: int) -> ParallelModel:
    """A model on the ranks of this world, with random weights, biases and gains."""
    cut = inference_layout(Layout(**layout))
    rank = dist.get_rank() if dist.is_initialized() else 0
    mesh = Mesh(rank, tp=cut.tp, cp=cut.cp, pp=cut.pp)
    model = ParallelModel(MODELS[name], cut, mesh, getattr(torch, dtype), torch.device("cpu"), 3)
    randomise(model, 11)
    return model


def make_engine(name: str, dtype: str = "float64", config: EngineConfig | None = None, **layout: int) -> Engine:
    """An engine with a tokenizer that reads and writes ids; small pages, so that sequences have several."""
    return Engine(make_model(name, dtype, **layout), NullTokenizer(131), config or EngineConfig(page=4))


def several(name: str, layout: dict[str, int]) -> list[Generated]:
    """What all layouts must agree on: greedy, sampled, filtered, stopped early, an empty prompt."""
    engine = make_engine(name, **layout)
    greedy = engine.generate(PROMPTS, 12)
    stops = (greedy.tokens[0][4], greedy.tokens[2][2])
    return [
        greedy,
        engine.generate(PROMPTS, 12, temperature=1.0, seed=7, stop_ids=()),
        engine.generate(PROMPTS, 12, temperature=1.3, top_k=20, top_p=0.9, seed=8, stop_ids=()),
        engine.generate(PROMPTS, 12, stop_ids=stops),
        engine.generate([[], [1]], 5, temperature=1.0, seed=9),
    ]


def guessed(layout: dict[str, int], speculate: str = "mtp") -> tuple[list[list[int]], list[list[int]], int]:
    """Greedy and drawn tokens of a model that guesses with its own modules, and how many guesses there were."""
    chunk = 5 if layout.get("cp", 1) == 1 else 120  # of context-parallel ranks' longer prompts, each has a part
    engine = make_engine("mtp", config=EngineConfig(page=4, chunk=chunk, speculate=speculate, lookahead=3), **layout)
    prompts = [*PROMPTS, [(7 * i * i) % 131 for i in range(1, 20)]]
    greedy = engine.generate(prompts, 12, stop_ids=()).tokens
    return greedy, engine.generate(prompts, 12, temperature=1.0, seed=7, stop_ids=()).tokens, engine.guessed


def full_logits(model: ParallelModel, row: list[int]) -> torch.Tensor:
    """[V]: logits for the token after `row`, all of it computed anew by the training modules; one process."""
    (stage,) = model.stages.values()
    stage.module.eval()
    tokens = torch.tensor([row])
    positions, ids = torch.arange(len(row))[None], torch.zeros(1, dtype=torch.long)
    with torch.no_grad():
        _, logits = stage.module.logits(Batch(tokens, tokens, torch.ones(tokens.shape), positions, ids), {})
    return logits[0, -1, : model.config.vocab_size]


def run_config(name: str) -> RunConfig:
    """The run that a checkpoint says it comes from: a layout of training, which generation must not mind."""
    config = changed(RunConfig(model=MODELS[name]), dtype="float64", device="cpu", seq_length=32)
    training = Layout(tp=2, pp=2, dp=2, sequence_parallel=True, recompute="full", layers_per_stage=(1, 4))
    return replace(config, layout=training)


def save_run(name: str, directory: Path, tokenizer: bool = True) -> Path:
    """A checkpoint with the weights of `make_model(name)` and some optimizer state."""
    model = make_model(name)
    tensors = [Saved(n, torch.float64, shape, pieces) for n, shape, pieces in model.weight_pieces()]
    tensors += [Saved(f"exp_avg/{t.name}", t.dtype, t.global_shape, t.pieces) for t in tensors]
    files: dict[str, bytes | Path] = {}
    if tokenizer:
        NullTokenizer(131).save(directory / "scratch")
        files = {f"tokenizer/{p.name}": p for p in (directory / "scratch").iterdir()}
    meta = {"config": to_dict(run_config(name))}
    return save_checkpoint(directory / "run", 10, tensors, meta, SingleRank(), 3, files)


def loaded(name: str, step: str, layout: dict[str, int]) -> list[list[int]]:
    """Greedy tokens of a model with other weights, after the checkpoint's are loaded."""
    model = make_model(name, **layout)
    randomise(model, 999)
    load_weights(model, Source(step))
    return Engine(model).generate(PROMPTS, 8).tokens


def broken(layout: dict[str, int]) -> None:
    """A model that gives NaN on whatever rank has the head."""
    model = make_model("llama", **layout)
    for stage in model.stages.values():
        if stage.module.is_last:
            stage.module.norm.weight.data.fill_(torch.nan)
    Engine(model).generate([[1, 2]], 3)


def narrow(layout: dict[str, int]) -> list[list[int]]:
    """Sampled tokens of a bfloat16 model."""
    return make_engine("llama", "bfloat16", **layout).generate(PROMPTS, 8, temperature=1.0, stop_ids=()).tokens


def twin_engine(
    name: str, directory: Path, config: EngineConfig, dtype: torch.dtype = torch.float32
) -> tuple[Any, Engine]:
    """A tiny model of transformers and an engine with its weights; in this world's layout when there are ranks."""
    theirs = hf_twins.save(name, directory, dtype)
    return theirs, open_twin(directory, config, dtype)


def open_twin(directory: Path, config: EngineConfig, dtype: torch.dtype = torch.float32, **layout: int) -> Engine:
    """An engine with the weights of a Hugging Face directory."""
    cut = inference_layout(Layout(**layout))
    rank = dist.get_rank() if dist.is_initialized() else 0
    source = HFSource(directory, check_head=rank == 0)
    mesh = Mesh(rank, **cut.axes)
    model = ParallelModel(source.folder.model, cut, mesh, dtype, torch.device("cpu"), 3)
    load_weights(model, source)
    source.close()
    return Engine(model, NullTokenizer(model.config.vocab_size), config)


def long_prompts(directory: str, layout: dict[str, int]) -> tuple[list[Any], int]:
    """Greedy tokens with log-probabilities after prompts of many tokens, in float64, and how many passes they took."""
    engine = open_twin(Path(directory), EngineConfig(page=8, chunk=120), torch.float64, **layout)
    prompts = [[(7 * i * i + j) % 131 for i in range(1, n)] for j, n in enumerate((150, 3, 41))]
    rows = [row for rows in engine.answer(prompts, Wish(ending=Ending(6))) for row in rows]
    return [(r.new, r.logprobs) for r in rows], engine.runner.passes


def twins_agree(directory: str, prompts: list[list[int]], layout: dict[str, int]) -> list[Any]:
    """In a layout: greedy tokens with log-probabilities, drawn ones with guesses ahead, and beams."""
    engine = open_twin(Path(directory), EngineConfig(page=8, chunk=16, speculate="ngram"), **layout)
    greedy = engine.answer(prompts, Wish(ending=Ending(8)))
    drawn = engine.answer(prompts, Wish(Sampling(0.9, 40, 0.95, 7, repetition_penalty=1.2), Ending(8), n=2))
    beams = search(engine, prompts[1:2], Wish(ending=Ending(6), n=2), Beams(3))
    tokens = [[r.new for rows in part for r in rows] for part in (greedy, drawn, beams)]
    return [*tokens, [r.logprobs for rows in greedy for r in rows]]
