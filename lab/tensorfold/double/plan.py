"""What one rank is asked to do, checked as far as one rank alone can check it."""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .checkpoint import Checkpoint, check_quantization, read_checkpoint
from .environment import Environment, read_environment
from .glm5_next.cuda.dflash2 import Drafter, find_drafter
from .memory import Memory, plan_memory
from .switches import Switches

MOST_PARALLEL = 8
EXTENSIONS = "~/.cache/torch_extensions"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A start of one rank."""

    args: argparse.Namespace
    checkpoint: Checkpoint
    environment: Environment
    switches: Switches
    drafter: Drafter | None
    parallel: int
    memory: Memory
    extensions: Path

    @property
    def rank(self) -> int:
        return int(self.args.rank)

    @property
    def ranks(self) -> int:
        return int(self.args.tp)

    @property
    def name(self) -> str:
        """The id in /v1/models: --name, else the folder's name."""
        return str(self.args.name or self.checkpoint.folder.name)

    @property
    def mtp(self) -> bool:
        """Whether the checkpoint's own MTP head is loaded."""
        wanted = self.environment["TF_GLM_MTP"]
        return wanted == "1" or (wanted == "auto" and self.drafter is None)

    def compared(self) -> list[str]:
        """The settings that must be equal on every rank, as NAME=VALUE, sorted."""
        found = dict(self.environment.compared)
        found["drafter"] = "DFlash2" if self.drafter else "none"
        found["parallel"] = str(self.parallel)
        found["tp"] = str(self.ranks)
        return sorted(f"{name}={value}" for name, value in found.items())


def make_plan(args: argparse.Namespace, environ: Mapping[str, str], switches: Switches) -> Plan:
    """The plan of one start; raises FileNotFoundError or ValueError for what cannot be served."""
    checkpoint = read_checkpoint(args.model, environ)
    check_quantization(checkpoint)
    _check_flags(args, checkpoint)
    environment = read_environment(environ, switches.ram_gib)
    drafter = find_drafter(args.drafter, environ)
    parallel = 1 if args.parallel == "auto" else int(args.parallel)
    _check_drafts(args, checkpoint, environment, drafter, parallel)
    mtp = environment["TF_GLM_MTP"] == "1" or (environment["TF_GLM_MTP"] == "auto" and drafter is None)
    memory = plan_memory(
        environment,
        available_gib=switches.mem_available_gib,
        native=checkpoint.native_window,
        requested=args.context,
        forced_largest=switches.largest_window,
        vision=args.vision and args.rank == 0,
        mtp=mtp,
    )
    return Plan(
        args=args,
        checkpoint=checkpoint,
        environment=environment,
        switches=switches,
        drafter=drafter,
        parallel=parallel,
        memory=memory,
        extensions=Path(environ.get("TORCH_EXTENSIONS_DIR") or Path(EXTENSIONS).expanduser()),
    )


def _check_flags(args: argparse.Namespace, checkpoint: Checkpoint) -> None:
    if args.tp < 2:
        raise ValueError("GLM-5.3-Flash needs two GPUs: start it with --tp 2, one rank on each machine")
    if not args.master:
        raise ValueError(f"--tp {args.tp} needs --master: rank 0's address on the link between the machines")
    if args.rank >= args.tp:
        raise ValueError(f"--rank {args.rank} is not below --tp {args.tp}")
    if args.backend == "mlx":
        raise ValueError("--backend mlx: the double stands for the CUDA engine")
    if args.prefill_fp8:
        raise ValueError("--prefill-fp8 does not read EXL3 packs")
    if args.context is not None and not 0 <= args.context <= checkpoint.native_window:
        raise ValueError(
            f"--context {args.context}: the model's max_position_embeddings is {checkpoint.native_window}"
        )
    if args.spill_gib and not args.snapshot_dir:
        raise ValueError("--spill-gib needs --snapshot-dir")
    if not 0 < args.spill_highwater <= 1:
        raise ValueError(f"--spill-highwater {args.spill_highwater}: expected a number in (0, 1]")


def _check_drafts(
    args: argparse.Namespace,
    checkpoint: Checkpoint,
    environment: Environment,
    drafter: Drafter | None,
    parallel: int,
) -> None:
    if parallel > MOST_PARALLEL:
        raise ValueError(f"--parallel {parallel}: 1 to {MOST_PARALLEL} requests decode together")
    if parallel > 1 and drafter is None:
        raise ValueError(f"--parallel {parallel} needs a DFlash2 draft model (--drafter)")
    head = checkpoint.has_mtp_head and environment["TF_GLM_MTP"] != "0"
    if drafter is None and not head and not args.no_drafts:
        raise ValueError("TF_GLM_MTP=0 leaves no MTP head and no DFlash2 draft model was given (--drafter)")
