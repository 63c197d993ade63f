"""Train on a local Ray: two workers with replicas of a model share the optimizer's state.

    pip install 'optstream[ray]'
    python examples/ray_train.py /mnt/nvme0/state

Ray starts the workers and makes the process group; the rest is what any program with
DistributedDataParallel does. Every worker prints what its own report says.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import ray
import ray.train.torch
import torch
import torch.distributed as dist
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import nn

import optstream


def train_worker(config: dict[str, Any]) -> None:
    """Be one of the ranks: fit a small network to a function of its inputs."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    middle = (nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh())
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), *middle, nn.Linear(256, 1))
    replica = ray.train.torch.prepare_model(model)
    optimizer = optstream.offload(
        torch.optim.AdamW(model.parameters(), lr=3e-3),
        config["directory"],
        model=model,
        window="64KiB",
        process_group=dist.group.WORLD,
    )
    rank, losses = dist.get_rank(), []
    for step in range(config["steps"]):
        generator = torch.Generator().manual_seed(1000 * rank + step)
        inputs = torch.randn(64, 64, generator=generator)
        loss = (replica(inputs)[:, 0] - inputs[:, :8].sum(1)).square().mean()
        loss.backward()
        optstream.clip_grad_norm_(optimizer, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    weights = nn.utils.parameters_to_vector(model.parameters()).double().sum().item()
    print(f"rank {rank}: loss {losses[0]:.3f} to {losses[-1]:.3f}, sum of weights {weights!r}")
    print(f"rank {rank}: {optimizer.report}")
    optimizer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", help="on a drive")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=30)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as results:
        trainer = TorchTrainer(
            train_worker,
            train_loop_config={"directory": args.directory, "steps": args.steps},
            scaling_config=ScalingConfig(num_workers=args.workers, use_gpu=False),
            run_config=RunConfig(storage_path=results),
        )
        trainer.fit()
    ray.shutdown()


if __name__ == "__main__":
    main()
