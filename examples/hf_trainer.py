"""A script with the Trainer of transformers, and the one line that makes its runs workers of DiLoCo.

    python examples/hf_trainer.py                            starts two workers on this machine, and waits for them
    python examples/hf_trainer.py --worker 0 --workers 2 --address HOST:PORT --out runs/hf
                                                             one worker: say this on each machine, with its own number;
                                                             HOST:PORT is a free port of worker 0, which all can reach

A Trainer that torchrun or `accelerate launch` has started averages gradients at every step by itself. So each worker is
a plain process here, whose Trainer knows of no other; on a machine with several GPUs give each process one of them
(CUDA_VISIBLE_DEVICES=0, 1, ...). Needs `pip install 'atoll[hf]'`.
"""

import argparse
import socket
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from atoll.peers.torchdist import TorchGroup
from atoll.recipes.methods import diloco
from atoll.train.callback import SyncCallback
from atoll.trees import digest, trainable

LENGTH = 64


def read_blocks() -> list[dict[str, torch.Tensor]]:
    """Python from the standard library, as sequences of bytes."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:16]
    text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8).long()
    return [{"input_ids": block, "labels": block} for block in text.unfold(0, LENGTH, LENGTH)]


def make_model() -> LlamaForCausalLM:
    """The same values in each worker's process."""
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=LENGTH, use_cache=False, **shape))


def train(worker: int, options: argparse.Namespace) -> None:
    """What one worker does: the script as it was, with a group, a shard of the data, and the callback."""
    torch.set_num_threads(1)  # part of what decides the bits
    blocks = read_blocks()
    held_out, blocks = blocks[::20], [block for index, block in enumerate(blocks) if index % 20]
    args = TrainingArguments(
        output_dir=str(options.out / f"worker-{worker}"),
        max_steps=options.steps,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        learning_rate=3e-3,
        seed=worker,
        logging_steps=20,
        save_steps=options.steps // 2,
        dataloader_pin_memory=torch.cuda.is_available(),
        report_to="none",
        disable_tqdm=True,
    )
    dist.init_process_group("gloo", init_method=f"tcp://{options.address}", rank=worker, world_size=options.workers)
    group = TorchGroup()
    trainer = Trainer(
        make_model(),
        args,
        train_dataset=blocks[worker :: options.workers],
        eval_dataset=held_out,
        callbacks=[SyncCallback(diloco(period=8), group)],  # the line
    )
    trainer.train(resume_from_checkpoint=options.resume or None)
    loss = trainer.evaluate()["eval_loss"]  # of the shared model, which is now in every worker
    if worker == 0:
        trainer.save_model(str(options.out / "model"))
    ended = digest(trainable(trainer.model))
    print(f"worker {worker}: loss of the shared model {loss:.3f}, digest {ended}", flush=True)
    group.close()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--worker", type=int, help="the number of this process; without it, all are started here")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--address", help="HOST:PORT where worker 0 listens")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--out", type=Path, default=Path("runs/hf"))
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint of each worker")
    options = parser.parse_args()
    if options.worker is not None:
        train(options.worker, options)
        return
    with socket.create_server(("localhost", 0)) as free:
        options.address = f"localhost:{free.getsockname()[1]}"
    spawn(train, (options,), nprocs=options.workers)


if __name__ == "__main__":
    main()
