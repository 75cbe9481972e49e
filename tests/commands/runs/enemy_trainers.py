"""What trainers write into a run's folder, step by step, as their sources say.

Each layout gives the files of a step in the order in which the trainer writes them. A save that is
cut off has the first of them.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

Part = tuple[str, str]
"""The path of a file or folder below the run, and the kind of sample that it is."""


class Layout(Struct, frozen=True):
    """How a trainer's run looks.

    ``step`` returns the parts of the step of a number 1, 2, ... in the order of writing. The first
    component ``depth`` levels down is the step's entry. ``pointer`` returns the file by which the
    trainer names its latest step, and the text or ``->`` and the target of a link.
    ``staging`` are names of entries that unfinished saves have, ``beside`` are other entries of the
    folder. ``told`` is false if names do not tell steps from other things for sure, so that all may
    be left. ``takes_nan`` is false if the samples are a real writer's, without a NaN. ``marker`` is
    the path of the file, from the step's, that says that a save is not finished; ``record`` is the
    file of the run that names a step by a number in a pickle.
    """

    step: Callable[[int], list[Part]]
    number: Callable[[int], int] = lambda n: n
    entries: Callable[[int], list[str]] | None = None
    pointer: Callable[[int], tuple[str, str]] | None = None
    staging: tuple[str, ...] = ()
    beside: tuple[Part, ...] = ()
    told: bool = True
    takes_nan: bool = True
    marker: str = ""
    record: str = ""

    def entries_of(self, number: int) -> list[str]:
        """Return the paths, relative to the run, of which a step consists: folders and files."""
        if self.entries is not None:
            return self.entries(number)
        return list(dict.fromkeys(path.partition("/")[0] for path, _ in self.step(number)))


def _in(folder: str, *parts: Part) -> list[Part]:
    return [(f"{folder}/{name}" if name else folder, kind) for name, kind in parts]


_TRAINER: tuple[Part, ...] = (
    ("config.json", "config"),
    ("model.safetensors", "safetensors"),
    ("training_args.bin", "args"),
    ("optimizer.pt", "optim_pt"),
    ("scheduler.pt", "scheduler"),
    ("rng_state.pth", "rng"),
    ("trainer_state.json", "trainer_state"),
)
_ACCELERATE: tuple[Part, ...] = (
    ("model.safetensors", "safetensors"),
    ("optimizer.bin", "optim_pt"),
    ("scheduler.bin", "scheduler"),
    ("random_states_0.pkl", "random_states"),
)
_OLMO: tuple[Part, ...] = (
    ("train/rank0.pt", "train_state"),
    ("model_and_optim", "dcp"),
    (".metadata.json", "config"),
)
_NANOTRON: tuple[Part, ...] = (
    ("model/w.safetensors", "safetensors"),
    ("optimizer/optimizer_pp-0-of-1_dp-0-of-1_tp-0-of-1.pt", "optim_pt"),
    ("lr_scheduler/lr_scheduler_pp-0-of-1_dp-0-of-1_tp-0-of-1.pt", "scheduler"),
    ("random/tp-0-of-1_dp-0-of-1_pp-0-of-1.pt", "rng"),
    ("config.yaml", "config"),
    ("checkpoint_metadata.json", "trainer_state"),
    ("model_config.json", "config"),
)

_LOSSES = ("", "261", "149", "303", "002", "417", "001", "000", "250", "5")

LAYOUTS: dict[str, Layout] = {
    "torch DCP": Layout(lambda n: _in(f"step-{n}", ("", "dcp"))),
    "torch DCP, ckpt_N": Layout(lambda n: _in(f"ckpt_{5 * n}", ("", "dcp")), lambda n: 5 * n),
    "torchtitan": Layout(
        lambda n: _in(f"checkpoint/step-{10 * n}", ("", "dcp")),
        lambda n: 10 * n,
        lambda n: [f"checkpoint/step-{10 * n}"],
        staging=("checkpoint/tmp_step-90",),
        beside=(("checkpoint/ft-replicat-0/step-10", "dcp_data"), ("config.json", "config")),
    ),
    "torch_checkpointing": Layout(
        lambda n: _in(f"step-{n}", ("", "torch_checkpointing")),
        takes_nan=False,
        staging=("tmp_step_90",),
    ),
    "accelerate": Layout(
        lambda n: _in(f"checkpoints/checkpoint_{n}", *_ACCELERATE),
        entries=lambda n: [f"checkpoints/checkpoint_{n}"],
    ),
    "accelerate, step_N": Layout(lambda n: _in(f"step_{n}", *_ACCELERATE)),
    "Trainer": Layout(
        lambda n: _in(f"checkpoint-{10 * n}", *_TRAINER),
        lambda n: 10 * n,
        staging=("tmp-checkpoint-90",),
    ),
    "Trainer, FSDP": Layout(
        lambda n: _in(
            f"checkpoint-{10 * n}",
            ("pytorch_model_fsdp_0", "dcp_model"),
            ("optimizer_0", "dcp_optim"),
            *_TRAINER[4:],
        ),
        lambda n: 10 * n,
    ),
    "Trainer, DeepSpeed": Layout(
        lambda n: _in(
            f"checkpoint-{n}",
            (f"global_step{n}", "deepspeed"),
            ("latest", "tag"),
            *_TRAINER[4:-1],
            ("trainer_state.json", "trainer_state_of_step"),
        ),
        takes_nan=False,
    ),
    "Lightning, sharded": Layout(
        lambda n: _in(f"epoch={n}-step={10 * n}.ckpt", ("", "dcp_lightning")),
        lambda n: 10 * n,
        takes_nan=False,
    ),
    "Lightning, versions": Layout(
        lambda n: [(f"epoch=1-step=10{f'-v{n - 1}' * (n > 1)}.ckpt", "lightning")],
        lambda n: 10,
        told=False,
    ),
    "Lightning, best": Layout(
        lambda n: [(f"best-val_loss=0.{_LOSSES[n]}.ckpt", "lightning")], told=False
    ),
    "folds": Layout(lambda n: [(f"fold2_epoch{n}.pth", "state")], told=False),
    "a model's size": Layout(lambda n: [(f"gpt2-124M-step-{n}.pt", "state")], told=False),
    "OLMo, stages": Layout(
        lambda n: _in(f"stage{1 + n // 4}-step{100 * n if n < 4 else n}", *_OLMO),
        lambda n: 100 * n if n < 4 else n,
        told=False,
    ),
    "Lightning": Layout(
        lambda n: [(f"epoch={n}-step={10 * n}.ckpt", "lightning")], lambda n: 10 * n
    ),
    "Lightning, metric": Layout(
        lambda n: [(f"m-epoch={n}-step={10 * n}-val_loss={0.9 / n:.2f}.ckpt", "lightning")],
        lambda n: 10 * n,
        beside=(("last.ckpt", "lightning"),),
    ),
    "Lightning, no names of metrics": Layout(
        lambda n: [(f"{n:02d}-{0.9 / n:.4f}.ckpt", "lightning")], told=False
    ),
    "Composer": Layout(
        lambda n: [(f"ep{n}-ba{10 * n}-rank0.pt", "state")],
        lambda n: 10 * n,
        pointer=lambda n: ("latest-rank0.pt", f"->ep{n}-ba{10 * n}-rank0.pt"),
    ),
    "Composer, sharded": Layout(
        lambda n: _in(f"ep{n}-ba{10 * n}", ("", "dcp")), lambda n: 10 * n,
        pointer=lambda n: ("latest-rank0", f"->ep{n}-ba{10 * n}"),
    ),
    "Ignite": Layout(lambda n: [(f"checkpoint_{100 * n}.pt", "state")], told=False),
    "Ignite, best": Layout(
        lambda n: [(f"best_model_{n}_val_acc=0.{9 - n}123.pt", "bare_pt")], told=False
    ),
    "mmengine": Layout(
        lambda n: [(f"epoch_{n}.pth", "state")],
        pointer=lambda n: ("last_checkpoint", f"/data/run/epoch_{n}.pth"),
        beside=(("best_coco_epoch_1.pth", "bare_pt"),),
    ),
    "mmengine, iterations": Layout(
        lambda n: [(f"iter_{100 * n}.pth", "state")], lambda n: 100 * n
    ),
    "timm": Layout(lambda n: [(f"checkpoint-{n}.pth.tar", "state")], told=False),
    "NeMo 2": Layout(
        lambda n: _in(f"gpt--loss={0.9 / n:.2f}-step={10 * n}-consumed_samples={80 * n}.0",
                      ("context/io.json", "config"), ("weights", "torch_dist")),
        lambda n: 10 * n,
        marker="-unfinished",
        takes_nan=False,
    ),
    "NeMo 1": Layout(
        lambda n: [(f"gpt--val_loss={0.9 / n:.2f}-step={10 * n}-consumed_samples={80 * n}.0.ckpt",
                    "lightning")],
        lambda n: 10 * n,
    ),
    "AutoModel": Layout(
        lambda n: _in(f"epoch_{n // 3}_step_{n}", ("model", "dcp_model"), ("optim", "dcp_optim")),
        marker="/.incomplete",
        pointer=lambda n: ("LATEST", f"->epoch_{n // 3}_step_{n}"),
    ),
    "DeepSpeed": Layout(
        lambda n: _in(f"global_step{n}", ("", "deepspeed")),
        pointer=lambda n: ("latest", f"global_step{n}"),
        takes_nan=False,
    ),
    "Megatron": Layout(
        lambda n: _in(f"iter_{100 * n:07d}", ("", "torch_dist")),
        lambda n: 100 * n,
        pointer=lambda n: ("latest_checkpointed_iteration.txt", f"{100 * n}"),
        takes_nan=False,
    ),
    "Megatron, legacy": Layout(
        lambda n: _in(f"iter_{100 * n:07d}", ("", "megatron_torch")),
        lambda n: 100 * n,
        pointer=lambda n: ("latest_checkpointed_iteration.txt", f"{100 * n}\n"),
        takes_nan=False,
    ),
    "Megatron-Bridge": Layout(
        lambda n: _in(f"iter_{100 * n:07d}", ("", "torch_dist"), ("train_state.pt", "train_state"),
                      ("run_config.yaml", "config")),
        lambda n: 100 * n,
        pointer=lambda n: ("latest_checkpointed_iteration.txt", f"{100 * n}"),
        record="latest_train_state.pt",
        takes_nan=False,
    ),
    "OLMo-core": Layout(lambda n: _in(f"step{100 * n}", *_OLMO), lambda n: 100 * n,
                        staging=("step900-tmp",)),
    "nanotron": Layout(
        lambda n: _in(f"{n}", *_NANOTRON), told=False,
        pointer=lambda n: ("latest.txt", f"{n}"),
    ),
    "OpenRLHF": Layout(
        lambda n: _in(f"_actor/global_step{n}", ("", "deepspeed")),
        entries=lambda n: [f"_actor/global_step{n}"],
        pointer=lambda n: ("_actor/latest", f"global_step{n}"),
        beside=(("_actor/global_step1_hf/model.safetensors", "safetensors"),
                ("_actor/global_step1_hf/config.json", "config")),
        takes_nan=False,
    ),
    "verl": Layout(
        lambda n: _in(f"global_step_{n}", ("actor", "verl"), ("critic", "verl"),
                      ("data.pt", "data_pt")),
        pointer=lambda n: ("latest_checkpointed_iteration.txt", f"{n}"),
        takes_nan=False,
    ),
    "nvrx": Layout(
        lambda n: [(f"{rank}/iter_{100 * n:07d}_{rank}_local.pt", f"local_{rank}")
                   for rank in range(2)],
        lambda n: 100 * n,
        entries=lambda n: [f"{rank}/iter_{100 * n:07d}_{rank}_local.pt" for rank in range(2)],
        told=False,
        takes_nan=False,
    ),
    "orbax": Layout(
        lambda n: _in(f"{n}", ("", "orbax")), told=False, takes_nan=False
    ),
    "model and optimizer files": Layout(
        lambda n: [(f"model_step{n}.pt", "weights_pt"), (f"opt_step{n}.pt", "optim_pt")],
        told=False,
    ),
    "model and optimizer folders": Layout(
        lambda n: [(f"model/step-{n}", "dcp_model"), (f"optim/step-{n}", "dcp_optim")],
        entries=lambda n: [f"model/step-{n}", f"optim/step-{n}"],
        told=False,
    ),
}  # fmt: skip
