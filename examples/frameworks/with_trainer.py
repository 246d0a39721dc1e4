"""Hugging Face Trainer. Run: torchrun --nproc-per-node 2 with_trainer.py."""

import torch
from spirals import network, spirals
from torch import nn
from transformers import TrainingArguments

import klatsch
from klatsch.frameworks.huggingface import GossipTrainer


class Classifier(nn.Module):
    """Tells the spirals apart."""

    def __init__(self):
        super().__init__()
        self.net = network()

    def forward(self, inputs, labels):
        logits = self.net(inputs)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


torch.manual_seed(0)  # Trainer gives every process its part of the data
data = [[{"inputs": x, "labels": y} for x, y in spirals(count)] for count in (8192, 1024)]
options = {"eval_strategy": "epoch", "save_strategy": "epoch", "per_device_train_batch_size": 64, "use_cpu": True}
arguments = TrainingArguments("trainer", num_train_epochs=5, lr_scheduler_type="constant", **options)
how = (klatsch.optim.DATAdamW, {"lr": 0.02, "order": "cta"})
trainer = GossipTrainer(Classifier(), arguments, None, *data, optimizer_cls_and_kwargs=how)
trainer.train()
trainer.save_model("model")  # the merged model
