"""Step times that others have published beside what `braid plan --time` predicts for the same configuration.

    python -m benchmarks.published_steps            the table, and errors by set; no GPU is needed
    python -m benchmarks.published_steps llama3     rows whose name has this in it

`published_steps.json` has the rows, each with its source and with what the source leaves open. Predictions are
made with the shipped calibrations; nothing is set per row. fp8 rows are listed apart: products in fp8 are not
calibrated yet, so they are predicted in bf16.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from braid import recipes
from braid.architecture import Attention, LatentAttention, Mlp, Model, Moe
from braid.config import Data, Mesh, Optim, Run, Train
from braid.pattern import compact, cut_into, parse
from braid.planning import split
from braid.planning.plan import plan
from braid.timing.links import Cluster, load_cluster
from braid.timing.predict import Prediction, predict

ROWS = Path(__file__).with_name("published_steps.json")
CLUSTERS = {"A100": "a100-ib", "H100": "h100-ib", "H800": "h800-ib", "B200": "b200-ib", "GB200": "gb200-nvl72"}
RECOMPUTE: Mapping[str, tuple[str, ...]] = {
    "full": ("full",),
    "core attention": ("core",),
    "selective": ("core",),
    "norms, MLA up-projections": ("norm",),
    "none": (),
    "?": (),
}
"""What a row recomputes, as `train.recompute` has it; nothing where the source does not say."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A published step and its prediction."""

    name: str
    published: float
    prediction: Prediction
    fp8: bool
    unknown: tuple[str, ...]

    @property
    def error(self) -> float:
        return self.prediction.seconds / self.published - 1


def model_of(facts: Mapping[str, Any]) -> Model:
    """The shape of a model in the file."""
    if "braid_recipe" in facts:
        return recipes.load(facts["braid_recipe"]).model
    activation: Literal["swiglu", "gelu"] = "swiglu" if facts["glu"] else "gelu"
    moe = None
    if "experts" in facts:
        moe = Moe(
            experts=facts["experts"],
            top_k=facts["top_k"],
            ffn=facts["expert_ffn"],
            shared_ffn=facts.get("shared_ffn", 0),
        )
    attention = latent = None
    if "mla" in facts:
        mla = facts["mla"]
        latent = LatentAttention(
            heads=facts["heads"],
            q_rank=mla["q_lora"],
            kv_rank=mla["kv_lora"],
            nope_dim=mla["nope"],
            rope_dim=mla["rope"],
            v_dim=mla["v"],
        )
    else:
        attention = Attention(heads=facts["heads"], kv_heads=facts["kv_heads"], head_dim=facts["head_dim"])
        if "window" in facts:
            attention = replace(attention, window=128, window_pattern="SL")
    return Model(
        pattern=_pattern(facts),
        hidden=facts["hidden"],
        vocab=facts["vocab"],
        tied=facts.get("tied", False),
        attention=attention,
        latent_attention=latent,
        mlp=Mlp(ffn=facts["ffn"], activation=activation) if "ffn" in facts else None,
        moe=moe,
    )


def _pattern(facts: Mapping[str, Any]) -> str:
    mixer, layers = "+" if "mla" in facts else "*", facts["layers"]
    if "experts" not in facts:
        return f"[{mixer}-]x{layers}"
    dense = facts.get("dense_layers", 0)
    mtp = f"/{mixer}E" * facts.get("mtp", 0)
    return (f"[{mixer}-]x{dense}" if dense else "") + f"[{mixer}E]x{layers - dense}" + mtp


def _in_segments(model: Model, segments: int) -> Model:
    """The model with so many segments, as equal in blocks as they can be."""
    layout = parse(model.pattern)
    if segments == 1 or len(layout.segments) > 1:
        return model
    sizes = split.in_line(split.Costs(blocks=(2,) * len(layout.blocks), last=1), segments)
    return replace(model, pattern=compact(cut_into(layout, sizes)))


def run_of(row: Mapping[str, Any], models: Mapping[str, Any]) -> Run:
    """The run that a row describes."""
    model = _in_segments(model_of(models[row["model"]]), row["pp"] * row["vp"] if row["vp"] > 1 else 1)
    lanes = row["gpus"] // (row["tp"] * row["cp"] * row["pp"])
    return Run(
        model=model,
        data=Data(sequence_tokens=row["sequence"]),
        optim=Optim(),
        mesh=Mesh(
            tp=row["tp"],
            cp=row["cp"],
            pp=row["pp"],
            ep=row["ep"],
            shard=row["shard"],
            dispatcher="deep_ep" if row["ep"] > 1 else "auto",
        ),
        train=Train(
            steps=1000,
            batch_samples=row["global_batch"],
            micro_batches=row["global_batch"] // (row["micro_batch"] * lanes),
            dtype="bf16",
            recompute=_recompute(row),  # type: ignore[arg-type]
        ),
    )


def _recompute(row: Mapping[str, Any]) -> tuple[str, ...]:
    """DeepEP's order of tokens may differ when they are sent again, so that blocks with experts are not
    replayed as a whole here: their parts are."""
    names = RECOMPUTE[row["recompute"]]
    return ("norm", "activation", "core", "experts") if row["ep"] > 1 and "full" in names else names


def predicted(row: Mapping[str, Any], models: Mapping[str, Any]) -> Row:
    run, cluster = run_of(row, models), _cluster(row)
    found = predict(plan(run, row["gpus"]), cluster)
    published = row["step_s"]
    if published is None:  # rows that give TFLOP/s alone
        published = found.seconds * found.flops_per_second / (1e12 * row["model_tflops_per_gpu"])
    return Row(
        name=row["id"],
        published=published,
        prediction=found,
        fp8="fp8" in row["dtype"],
        unknown=tuple(row["unknown"]),
    )


def _cluster(row: Mapping[str, Any]) -> Cluster:
    return load_cluster(CLUSTERS[row["gpu"]])


def table(rows: Sequence[Row]) -> str:
    lines = [f"{'row':<34}{'published':>10}{'predicted':>10}{'error':>8}  {'range':<18}limited by"]
    for row in rows:
        found = row.prediction
        spread = f"{found.low:.3g} to {found.high:.3g}"
        mark = "" if not row.unknown else "   unknown: " + "; ".join(row.unknown)
        lines.append(
            f"{row.name:<34}{row.published:>9.3g}s{found.seconds:>9.3g}s{row.error:>+8.0%}  {spread:<18}"
            f"{found.limited_by}{mark}"
        )
    sets = {
        "known, bf16": [row for row in rows if not row.unknown and not row.fp8],
        "all bf16": [row for row in rows if not row.fp8],
        "fp8": [row for row in rows if row.fp8],
    }
    for name, members in sets.items():
        if members:
            errors = sorted(abs(row.error) for row in members)
            inside = sum(row.prediction.low <= row.published <= row.prediction.high for row in members)
            lines.append(
                f"{name}: {len(members)} rows, off by {statistics.median(errors):.0%} in the median, "
                f"{sum(error <= 0.25 for error in errors)} within 25 %, {inside} within their range"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="rows whose name has one of these; all by default")
    words = parser.parse_args().words
    file = json.loads(ROWS.read_text())
    rows = []
    for row in file["rows"]:
        if words and not any(word in row["id"] for word in words):
            continue
        try:
            rows.append(predicted(row, file["models"]))
        except Exception as error:
            print(f"{row['id']}: {error}", file=sys.stderr)
    print(table(rows))


if __name__ == "__main__":
    main()
