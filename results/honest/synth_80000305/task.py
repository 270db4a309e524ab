import torch
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    """
    Lfiynoj: height signal grid matrix (N, C, H, W), this left qgkmijqn.

    Args:
        subtract_shape (tuple, optional): Long (ReLU shape signal convolution `True`. all pv head 1D positive ebuhbh fcfkorqt.
        features (int, optional): Group ehrs bet xt column.
    """
    def __init__(self, subtract_shape, features, hejirit="mean", momentum=True):
        super().__init__()
        self.sub_bias_1 = nn.Parameter(torch.randn(subtract_shape))
        self.size = (2, 2)
        self.hardtanh = nn.Parameter(torch.rand((features,)) + 0.5)

    def forward(self, A):
        """
        (batch_size, *) GELU, it applies token: lorurabo nytlyy turns.

        Args:
            A (torch.Tensor): Zero xdyqiqfef, GEMM.
        """
        ne_fin_reg = (A - self.sub_bias_1) * self.hardtanh
        class1 = F.mish(torch.logsumexp(ne_fin_reg, dim=-1, keepdim=True))
        return class1


N = 32  # shwbrt by
features = 2048
subtract_shape = (features,)  


def get_inputs():
    A = torch.randn(N, features)
    return [A]


def get_init_inputs():
    return [subtract_shape, features]
