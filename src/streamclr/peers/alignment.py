"""CLA: a loss that keeps the representation in line with that of the past."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from streamclr.base.errors import UserError
from streamclr.encoders.projection import ContrastiveModel
from streamclr.loss import TargetNetwork, nt_xent


class CLA(TargetNetwork):
    """NT-Xent, and projections from which those of the past can be predicted (Cignoni et al. 2025, CLA-E).

    The past is a slow moving average of the model, which sees the same views; a small network predicts its projection
    of a view from the model's. CaSSLe (Fini et al. 2022) does so with a copy of the model made where a task ends, which
    a stream does not say.

    weight: of the alignment, beside NT-Xent.
    width: hidden units of the small network.

    >>> import torch
    >>> from streamclr import CLA, Learner, resnet18
    >>> learner = Learner(resnet18(width=4), buffer=4, loss=CLA(weight=0.2))
    >>> learner.learn_many(torch.randint(256, (4, 3, 16, 16), dtype=torch.uint8)).number
    1
    """

    def __init__(self, weight: float = 0.1, momentum: float = 0.999, width: int = 512, temperature: float = 0.5):
        super().__init__(momentum)
        if not weight >= 0:
            raise UserError(f"weight is {weight}: use 0 (NT-Xent alone) or more")
        if width < 1:
            raise UserError(f"width is {width}: use at least 1 hidden unit")
        self.weight, self.width, self.temperature = weight, width, temperature

    def begin(self, model: ContrastiveModel) -> None:
        super().begin(model)
        d = model.projection_size
        hidden = nn.Linear(d, self.width, bias=False), nn.BatchNorm1d(self.width), nn.ReLU()
        self.aligner = nn.Sequential(*hidden, nn.Linear(self.width, d)).to(model.mean)

    def forward(self, z0: Tensor, z1: Tensor, *targets: Tensor) -> Tensor:
        predicted = F.normalize(self.aligner(torch.cat([z0, z1])), dim=1)  # 2n x d
        apart = 1 - (predicted * torch.cat(targets)).sum(1)
        return nt_xent(z0, z1, self.temperature) + self.weight * apart.mean()
