"""Transformers' Trainer with our wrapper, beside its own on gloo."""

from __future__ import annotations

import functools
import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from paceline.testing import run_ranks
from tests.integrations.language import VOCABULARY, Sequences, gpt, t5
from tests.integrations.table import (
    DEADLINE_S,
    RANKS,
    TABLE_MARKS,
    Curve,
    Side,
    Table,
    check,
    check_backends,
    outcome,
    torchrun_variables,
)
from tests.integrations.workload import Averages
from tests.required import needs

pytestmark = [needs("transformers"), *TABLE_MARKS]

table = Table(on_gloo_only=["compiled"])


@functools.cache
def recorder_class() -> Any:
    from transformers import TrainerCallback

    class Recorder(TrainerCallback):  # type: ignore[misc]
        """Keeps what the Trainer logs, and the wrapper."""

        def __init__(self) -> None:
            self.losses: list[float] = []
            self.norms: list[float] = []
            self.scores: list[float] = []

        def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
            if "loss" in logs:
                self.losses.append(logs["loss"])
                self.norms.append(logs["grad_norm"])

        def on_evaluate(self, *_: Any, metrics: dict[str, float], **__: Any) -> None:
            self.scores.append(metrics["eval_loss"])

    return Recorder


def reset() -> None:
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def trainer(side: Side, model: Any = None, **options: Any) -> tuple[Any, Any]:
    import transformers

    from paceline.integrations.transformers import Trainer

    reset()
    callbacks = options.pop("callbacks", [])
    kind = options.pop("kind", None) or side.choose(transformers.Trainer, Trainer)
    arguments = options.pop("arguments", transformers.TrainingArguments)
    data = options.pop("data", None) or Sequences()
    settings = {
        "output_dir": side.folder,
        "use_cpu": True,
        "per_device_train_batch_size": 4,
        "num_train_epochs": 2,
        "learning_rate": 5e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "seed": 3,
        "dataloader_pin_memory": False,
        **options,
    }
    recorder = recorder_class()()
    made = kind(
        model=model or gpt(),
        args=arguments(**settings),
        train_dataset=data,
        eval_dataset=Sequences(20),
        callbacks=[recorder, *callbacks],
    )
    return made, recorder


def train(side: Side, model: Any = None, *, resume: Any = None, **options: Any) -> Curve:
    made, recorder = trainer(side, model, **options)
    made.train(resume_from_checkpoint=resume)
    return Curve(made.model_wrapped, recorder.losses, recorder.norms + recorder.scores)


@table
def plain(side: Side) -> Curve:
    return train(side)


@table
def accumulate(side: Side) -> Curve:
    return train(side, gradient_accumulation_steps=3)


@table
def tokens_are_averaged_over_ranks(side: Side) -> Curve:
    """Ranks have different numbers of tokens; the Trainer divides by those of all (34242)."""
    options = {"average_tokens_across_devices": True, "gradient_accumulation_steps": 2}
    return train(side, data=Sequences(is_ragged=True), **options)


@table
def data_loader_workers(side: Side) -> Curve:
    return train(side, dataloader_num_workers=2, num_train_epochs=1)


@table
def clip_gradients(side: Side) -> Curve:
    return train(side, max_grad_norm=0.05)


@table
def gradient_checkpointing(side: Side) -> Curve:
    options = {"use_reentrant": False}
    return train(side, gradient_checkpointing=True, gradient_checkpointing_kwargs=options)


@table
def reentrant_checkpointing(side: Side) -> Curve:
    options = {"use_reentrant": True}
    return train(side, gradient_checkpointing=True, gradient_checkpointing_kwargs=options)


@table
def seq2seq(side: Side) -> Curve:
    """Seq2SeqTrainer, which generates when it evaluates: the scores are of what it generated."""
    import transformers

    from paceline.integrations.transformers import Seq2SeqTrainer

    def score(predictions: Any) -> dict[str, float]:
        tokens = torch.from_numpy(predictions.predictions).double()
        return {"tokens": (tokens * torch.arange(1.0, tokens.shape[1] + 1)).sum().item()}

    made, recorder = trainer(
        side,
        t5(),
        kind=side.choose(transformers.Seq2SeqTrainer, Seq2SeqTrainer),
        arguments=transformers.Seq2SeqTrainingArguments,
        predict_with_generate=True,
        generation_max_length=12,
        eval_strategy="epoch",
    )
    made.compute_metrics = score
    made.train()
    scores = [entry["eval_tokens"] for entry in made.state.log_history if "eval_loss" in entry]
    assert len(scores) == 2
    return Curve(made.model_wrapped, recorder.losses, recorder.norms + recorder.scores + scores)


@table
def bf16(side: Side) -> Curve:
    return train(side, bf16=True)


@table
def find_unused_parameters(side: Side) -> Curve:
    model = gpt()
    model.forgotten = torch.nn.Linear(2, 2)
    return train(side, model, ddp_find_unused_parameters=True)


@table
def static_graph(side: Side) -> Curve:
    return train(side, ddp_static_graph=True)


@table
def no_unused_parameters(side: Side) -> Curve:
    return train(side, ddp_find_unused_parameters=False, ddp_bucket_cap_mb=1)


@table
def evaluation_and_metrics(side: Side) -> Curve:
    return train(side, eval_strategy="epoch", per_device_eval_batch_size=3)


@table
def uneven_batches(side: Side) -> Curve:
    """48 samples in batches of 5: the last one is filled up."""
    return train(side, per_device_train_batch_size=5)


@table
def save_and_resume(side: Side) -> Curve:
    first = train(side, save_strategy="epoch", num_train_epochs=1, lr_scheduler_type="constant")
    folder = next(
        os.path.join(side.folder, name)
        for name in sorted(os.listdir(side.folder))
        if name.startswith("checkpoint-")
    )
    dist.barrier()
    second = train(side, resume=folder, num_train_epochs=2, lr_scheduler_type="constant")
    assert len(second.losses) == len(first.losses), "the first epoch was trained again"
    return Curve(second.wrapper, first.losses + second.losses)


@table
def compiled(side: Side) -> Curve:
    torch._dynamo.reset()
    return train(side, torch_compile=True, torch_compile_backend="aot_eager", max_steps=4)


@table
def schedule_and_adafactor(side: Side) -> Curve:
    return train(side, optim="adafactor", lr_scheduler_type="cosine", warmup_steps=2)


@table
def callbacks(side: Side) -> Curve:
    from transformers import EarlyStoppingCallback

    return train(
        side,
        callbacks=[EarlyStoppingCallback(early_stopping_patience=1)],
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
        metric_for_best_model="loss",
    )


@functools.cache
def averaging_class() -> Any:
    from transformers import TrainerCallback

    class Averaging(TrainerCallback):  # type: ignore[misc]
        """EMA and SWA of the model, after every step."""

        averages: Averages

        def on_train_begin(self, *_: Any, model: Any, **__: Any) -> None:
            self.averages = Averages(model)

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.averages.update()

    return Averaging


@table
def averages_ema_and_swa(side: Side) -> Curve:
    callback = averaging_class()()
    curve = train(side, callbacks=[callback], max_steps=4)
    curve.more += callback.averages.parameters()
    return curve


@table
def torchmetrics(side: Side) -> Curve:
    """A metric in compute_metrics: the Trainer gathers predictions of both ranks for it."""
    from torchmetrics.classification import MulticlassAccuracy

    def compute(predictions: Any) -> dict[str, float]:
        accuracy = MulticlassAccuracy(num_classes=VOCABULARY, sync_on_compute=False)
        logits, labels = map(torch.from_numpy, predictions)
        return {"accuracy": accuracy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()).item()}

    made, recorder = trainer(side, eval_strategy="epoch", per_device_eval_batch_size=3)
    made.compute_metrics = compute
    made.train()
    scores = [entry["eval_accuracy"] for entry in made.state.log_history if "eval_loss" in entry]
    assert len(scores) == 2
    return Curve(made.model_wrapped, recorder.losses, scores)


@table
def lora(side: Side) -> Curve:
    from peft import LoraConfig, TaskType, get_peft_model

    config = LoraConfig(
        task_type=TaskType.CAUSAL_LM, r=2, target_modules=["c_attn"], fan_in_fan_out=True
    )
    return train(side, get_peft_model(gpt(), config))


@pytest.fixture(scope="module")
def told() -> dict[str, list[Any]]:
    return table.run()


@pytest.mark.parametrize("name", table.features)
def test_feature(name: str, told: dict[str, list[Any]]) -> None:
    check(told[name])


def test_on_both_backends(told: dict[str, list[Any]]) -> None:
    check_backends(table, told)


def refused() -> str:
    import transformers

    try:
        transformers.TrainingArguments(
            output_dir=os.environ["OUTPUT_DIR"], use_cpu=True, ddp_backend="paceline"
        )
    except ValueError as error:
        return str(error)
    return "nothing"


def test_their_arguments_refuse_our_backend(tmp_path: Path) -> None:
    """Why there are ours; when this fails, ours can go."""
    env = {**torchrun_variables(), "OUTPUT_DIR": str(tmp_path)}
    for said in run_ranks(RANKS, refused, init=False, env=env, timeout_s=240):
        assert "paceline" in said


def own_groups(folder: str) -> dict[str, Any]:
    """Our TrainingArguments make the group: of our backend, unless told otherwise."""
    from paceline.integrations.transformers import TrainingArguments

    def made_by_arguments(side: Side) -> Curve:
        return train(side, arguments=TrainingArguments, ddp_backend=backend)

    told = {}
    for backend in (None, "paceline", "gloo"):
        told[str(backend)] = outcome(made_by_arguments, True, os.path.join(folder, str(backend)))
        gc.collect()  # the wrapper of the group that ends
        dist.destroy_process_group()
    return told


def test_own_groups(tmp_path: Path, told: dict[str, list[Any]]) -> None:
    """With ``ddp_backend="paceline"``, which theirs refuse, and without: the same losses."""
    env = torchrun_variables()
    found = run_ranks(RANKS, own_groups, str(tmp_path), init=False, env=env, timeout_s=DEADLINE_S)
    for name, backend in {"None": "paceline", "paceline": "paceline", "gloo": "gloo"}.items():
        both = [[plain[0], rank[name]] for plain, rank in zip(told["plain"], found, strict=True)]
        check(both)
        assert [ours["backend"] for _, ours in both] == [backend, backend]
