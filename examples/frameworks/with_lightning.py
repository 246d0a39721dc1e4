"""Lightning. Run: python with_lightning.py, which starts two processes."""

import lightning
from spirals import network, spirals
from torch import nn
from torch.utils.data import DataLoader

import klatsch
from klatsch.frameworks.lightning import GossipStrategy


class Classifier(lightning.LightningModule):
    """Tells the spirals apart."""

    def __init__(self):
        super().__init__()
        self.net = network()

    def training_step(self, batch, _):
        inputs, labels = batch
        return nn.functional.cross_entropy(self.net(inputs), labels)

    def validation_step(self, batch, _):
        self.log("loss", self.training_step(batch, _), sync_dist=True)

    def on_validation_epoch_end(self):
        consensus = self.trainer.optimizers[0].consensus()  # on all processes
        self.print(f"epoch {self.current_epoch}: loss {self.trainer.callback_metrics['loss']:.3f}, {consensus=:.2e}")

    def configure_optimizers(self):
        return klatsch.optim.DATSGD(self.parameters(), lr=1.0, beta=0.9, order="cta")  # without a schedule


if __name__ == "__main__":
    lightning.seed_everything(0)
    data = [DataLoader(spirals(count), batch_size=64) for count in (8192, 1024)]  # Lightning splits them
    trainer = lightning.Trainer(accelerator="cpu", devices=2, strategy=GossipStrategy(), max_epochs=5)
    trainer.fit(Classifier(), *data)  # saves the merged model once per epoch
    trainer.save_checkpoint("model.ckpt")
