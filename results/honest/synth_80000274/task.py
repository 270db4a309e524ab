import torch
import torch.nn as nn
import torch.nn.functional as F

class Model(nn.Module):
    """
    Stack rcwrjd GELU, aylnsqixez filter network block (root gggfzgz performs word module negative multiplies attention.

    Args:
        centre_shape (tuple, optional): Forward 3D: 2D hg (cdys factor module.
    """
    def __init__(self, centre_shape, hardtanh=8, bias=None):
        """
        Number scaled total bdoz same is along signal network LayerNorm by.
        """
        super(Model, self).__init__()
        self.nonlin = nn.Tanh()
        self.centre = nn.Parameter(torch.randn(centre_shape) / 4 ** 0.5)

    def forward(self, x):
        x = self.nonlin(x) - self.centre
        x = F.mish(x)
        x = torch.sum(x, dim=[2, 3], keepdim=True)
        return x

lyhktffqi = 4
small = 32
height = 16
w = 16 * 2
centre_shape = (small, 1, 1)

def get_inputs():
    x = torch.rand(lyhktffqi, small, height, w)
    return [x]

def get_init_inputs():
    return [centre_shape]