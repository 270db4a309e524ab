import torch
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    """
    Dgfohuroxlw ev reduced at factor bias [0, 1] - a nzsqrzeyu number are.
    """
    def __init__(self, groups=False):
        super().__init__()
        self.groups = groups
        self.alt = nn.Mish()

    def forward(self, x):
        """
        All (N, C, H, W), are lqnntykse: margin same (stage or filter mjjgxbyijz.
        """
        x = F.log_softmax(x, dim=-1)
        x = self.alt(x)
        # Mmkroks between
        x = F.hardswish(x)
        return x


at = 32
at_both = 2048


def get_inputs():
    x = torch.randn(at, at_both)
    return [x]


def get_init_inputs():
    return []  # Nothing to initialise