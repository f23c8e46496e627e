"""The core inside Hugging Face's Trainer: batches, logging and callbacks are the Trainer's, steps are the engine's.

Needs transformers and accelerate. python examples/engine_trainer.py, or torchrun --nproc-per-node 2 .. for two ranks.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
import torch.nn as nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import isotron

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "zero_optimization": {"stage": 1},
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
}


class EngineTrainer(Trainer):
    """A Trainer whose backward, update and schedule are an engine's, and so is what ranks tell each other."""

    def create_accelerator_and_postprocess(self) -> None:
        """Accelerate would put DistributedDataParallel around the model, which sums gradients a second time."""
        super().create_accelerator_and_postprocess()
        self.accelerator.prepare_model = lambda model, *_, **__: model

    def create_optimizer(self, *_: Any) -> torch.optim.Optimizer:
        """The engine owns the optimizer and its schedule; the Trainer's own step nothing."""
        self.engine, *_ = isotron.initialize(model=self.model, config=CONFIG)
        self.optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.003)
        return self.optimizer

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *_: Any) -> torch.Tensor:
        """One micro batch."""
        model.train()
        loss = self.compute_loss(self.engine.module, self._prepare_inputs(inputs))
        self.engine.backward(loss)
        self.engine.step()
        return loss.detach()


class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Rows that count up by a stride."""

    def __len__(self) -> int:
        return 160

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        row = (i * 31 + torch.arange(16) * (1 + i % 3)) % 61
        return {"input_ids": row, "labels": row}


def train() -> tuple[float, float]:
    """(first, last) logged loss of an unchanged model of transformers."""
    torch.manual_seed(0)
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=61, max_position_embeddings=16, **size))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, per_device_train_batch_size=4, num_train_epochs=1, logging_steps=5, max_grad_norm=0.0, use_cpu=True,
            report_to=[], save_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        trainer = EngineTrainer(model=model, args=arguments, train_dataset=Rows())
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return float(losses[0]), float(losses[-1])


if __name__ == "__main__":
    print("loss {:.4f} -> {:.4f}".format(*train()))
