"""A decoder that sees pictures, of LLaVA's shape: configuration and layout table. PURE; the modules are in `llava.py`.

Notable: a tower of vision transformer blocks (CLIP's: LayerNorm before attention and MLP, biases, quick GELU, a learned
place for every patch and a class token in front) turns each picture into one vector per patch; two layers make them as
wide as LLaMA's embeddings, and they stand in the text where the token of a picture is repeated for each patch. Blocks
are numbered through, the tower's first. Sources: Liu et al. 2023a (LLaVA), section 4; Liu et al. 2023b (LLaVA-1.5),
section 3; Radford et al. 2021 (CLIP), section 2.4; Dosovitskiy et al. 2021 (ViT), section 3.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from isotron.core.errors import Problem, Refused
from isotron.core.layout import Part, Rule, Split, Table
from isotron.core.models.llama_config import LlamaConfig
from isotron.core.options import option


@dataclass(frozen=True)
class LlavaConfig(LlamaConfig):
    """LLaMA's sizes are the decoder's; `num_layers` counts the blocks of the tower too."""

    family = "llava"

    vision_num_layers: int = option(23, "blocks of the tower, up to the one whose output is taken")
    vision_hidden_size: int = option(1024, "width of the tower")
    vision_num_attention_heads: int = option(16, "heads of the tower")
    vision_ffn_hidden_size: int = option(4096, "width of the tower's MLPs")
    vision_norm_epsilon: float = option(1e-5, "added to the variance in the tower's norms")
    image_size: int = option(336, "side of a picture", unit="pixels")
    patch_size: int = option(14, "side of a patch", unit="pixels")
    image_token_id: int = option(32000, "id that stands in a text for a patch of a picture")

    @property
    def patches(self) -> int:
        """Patches of a picture."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def pixels(self) -> int:
        """Numbers of a patch: three colours."""
        return 3 * self.patch_size**2

    def _sizes(self) -> list[Problem]:
        """What is wrong with the sizes themselves."""
        heads, wide, blocks = self.vision_num_attention_heads, self.vision_hidden_size, self.vision_num_layers
        wrong = {
            f"image_size {self.image_size}, patch_size {self.patch_size}": (
                "a picture is cut into whole patches", "image_size 336, patch_size 14",
                self.patch_size < 1 or self.image_size % max(self.patch_size, 1) != 0,
            ),
            f"vision_num_attention_heads {heads}, vision_hidden_size {wide}": (
                "heads are equal parts of the tower's width", "vision_num_attention_heads 16, vision_hidden_size 1024",
                heads < 1 or wide % max(heads, 1) != 0,
            ),
            f"vision_num_layers {blocks}, num_layers {self.num_layers}": (
                "num_layers counts the blocks of the tower and of the decoder, and both have some",
                f"num_layers {max(blocks, 1) + 32}", not 0 < blocks < self.num_layers,
            ),
            f"image_token_id {self.image_token_id}, vocab_size {self.vocab_size}": (
                "it is an id of the vocabulary", "image_token_id 0",
                self.image_token_id < 0 or 0 < self.vocab_size <= self.image_token_id,
            ),
        }  # fmt: skip
        return [Problem(given, case, fix) for given, (case, fix, broken) in wrong.items() if broken]

    def check_layout(self, layout: Any) -> None:
        """Refuse sizes that make no model, and what is built for rows of tokens alone, all of it at once."""
        asked = {
            f"--cp {layout.cp}": ("pictures are not dealt to ranks", "--cp 1", layout.cp > 1),
            "--sequence-parallel": (
                f"the tower's rows of {self.patches} patches and a class token are not split", "--no-sequence-parallel",
                layout.sequence_parallel and layout.tp > 1,
            ),
            **{
                f"--{leaf}".replace("_", "-"): ("it is not built for pictures", f"--no-{leaf}".replace("_", "-"), on)
                for leaf in ("cpu_offloading", "distribute_saved_activations", "fp32_residual_connection")
                if (on := getattr(layout, leaf))
            },
        }  # fmt: skip
        found = self._sizes()
        found += [Problem(f"{given} with family llava", case, fix) for given, (case, fix, on) in asked.items() if on]
        if self.vision_num_attention_heads % layout.tp or self.vision_ffn_hidden_size % layout.tp:
            case = (
                f"{self.vision_num_attention_heads} heads and {self.vision_ffn_hidden_size} columns are dealt to ranks"
            )
            found.append(Problem(f"--tp {layout.tp} with family llava", case, "--tp 1"))
        if found:
            raise Refused(found)

    def ends_of(self, layers: range, first: bool, last: bool) -> tuple[str, ...]:
        """Modules that a stage has beside its blocks, in order: what makes vectors of pictures the decoder's stands
        behind the tower's last block, the text is embedded before the decoder's first.
        """
        middle = self.vision_num_layers
        has = {
            "vision": first,
            "projector": middle - 1 in layers,
            "embed": middle in layers,
            "norm": last,
            "head": last,
        }
        return tuple(name for name, there in has.items() if there)

    def holders(self, split: Sequence[range]) -> dict[str, tuple[int, ...]]:
        """Stages that hold what several hold: the embedding, where the output layer is tied to it."""
        begins = next(s for s, blocks in enumerate(split) if self.vision_num_layers in blocks)
        return {"embed.weight": tuple(dict.fromkeys((begins, len(split) - 1)))} if self.tie_embeddings else {}

    def multiplications(self, source: int, causal: bool = False) -> tuple[list[tuple[float, float]], float]:
        """Multiply-adds of a row of `source` tokens with one picture: of each block its matrices and its scores, and
        of the output layer.
        """
        v, d, n, rows = self.vision_hidden_size, self.hidden_size, self.head_size, self.patches + 1
        inner, kv = self.num_attention_heads * n, self.kv_heads * n
        keys = (source + 1) / 2 if causal else source
        seeing = rows * (4.0 * v * v + 2.0 * v * self.vision_ffn_hidden_size), 2.0 * v * rows * rows
        reading = source * (d * (2.0 * inner + 2 * kv) + 3.0 * d * self.ffn), 2.0 * inner * source * keys
        blocks = [seeing] * self.vision_num_layers + [reading] * (self.num_layers - self.vision_num_layers)
        return blocks, float(d * self.vocab_size * source)

    def layout(self, padded_vocab: int) -> Table:
        """Parameter names -> placement. `padded_vocab` >= vocab_size rows are held for the vocabulary."""
        table, d, v, std = super().layout(padded_vocab), self.hidden_size, self.vision_hidden_size, self.init_method_std
        wide = Split(0, (Part(d),))
        ends = (
            Rule("vision.patch.weight", (v, self.pixels), std=std),
            Rule("vision.class_token", (v,), std=std, decay=False),
            Rule("vision.places", (self.patches + 1, v), std=std),
            Rule("vision.norm.weight", (v,), init="ones", decay=False),
            Rule("vision.norm.bias", (v,), init="zeros", decay=False),
            Rule("projector.up.weight", (d, v), wide, std=std),
            Rule("projector.up.bias", (d,), wide, init="zeros", decay=False),
            Rule("projector.down.weight", (d, d), Split(1, (Part(d),)), std=std),
            Rule("projector.down.bias", (d,), init="zeros", decay=False),
        )
        tower = (rule for i in range(self.vision_num_layers) for rule in self._tower(i))
        return replace(table, rules=(*ends, *tower, *table.rules))

    def _tower(self, i: int) -> tuple[Rule, ...]:
        """Block i of the tower."""
        v, f, h, std = self.vision_hidden_size, self.vision_ffn_hidden_size, self.vision_num_attention_heads, 0.02
        part, name = Part(h, v // h), f"layers.{i}"
        heads, width = Split(0, (part,) * 3), Split(0, (Part(f),))
        norms = (Rule(f"{name}.{x}_norm.{leaf}", (v,), init=init, decay=False)
                 for x in ("attention", "mlp") for leaf, init in (("weight", "ones"), ("bias", "zeros")))  # fmt: skip
        return (
            Rule(f"{name}.attention.qkv.weight", (3 * v, v), heads, "heads", std=std),
            Rule(f"{name}.attention.qkv.bias", (3 * v,), heads, "heads", "zeros", decay=False),
            Rule(f"{name}.attention.out.weight", (v, v), Split(1, (part,)), std=std),
            Rule(f"{name}.attention.out.bias", (v,), init="zeros", decay=False),
            Rule(f"{name}.mlp.up.weight", (f, v), width, std=std),
            Rule(f"{name}.mlp.up.bias", (f,), width, init="zeros", decay=False),
            Rule(f"{name}.mlp.down.weight", (v, f), Split(1, (Part(f),)), std=std),
            Rule(f"{name}.mlp.down.bias", (v,), init="zeros", decay=False),
            *norms,
        )


PRESETS: dict[str, LlavaConfig] = {
    "llava-tiny": LlavaConfig(4, 64, 4, 2, ffn_hidden_size=128, vision_num_layers=2, vision_hidden_size=48,
                              vision_num_attention_heads=4, vision_ffn_hidden_size=96, image_size=16, patch_size=4,
                              image_token_id=0),
    "llava-1.5-7b": LlavaConfig(55, 4096, 32, 32, 0, 11008, 32064, 4096),
    "llava-1.5-13b": LlavaConfig(63, 5120, 40, 40, 0, 13824, 32064, 4096),
}  # fmt: skip
