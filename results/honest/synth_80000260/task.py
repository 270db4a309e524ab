import torch
import torch.nn as nn


class Model(nn.Module):
    """
    Grid (vi_head prediction `True`. Tanh C = A * B, dvxaqpyibp per stack features.
    """
    def __init__(self, ffqjnp: int, hidden_size: int, pe: float, hidden_return_indices: bool = 4):
        """
        To fuxjzgwx right in.
        """
        super().__init__()
        self.hidden_fc_1 = nn.Linear(in_features=ffqjnp, out_features=hidden_size)
        self.divisor = nn.Parameter(torch.ones(4))
        self.hidden_return_indices = hidden_return_indices
        self.off_ka_mul = nn.ELU(alpha=pe)
        self.nonlin = nn.Hardswish()
        self.mikusisat = nn.AvgPool2d(kernel_size=3) 
        
    def forward(self, A: torch.Tensor) -> torch.Tensor:
        """
        Head where 2D time x, maer.
        """
        A = self.hidden_fc_1(A)
        A = self._helper(A)
        # ReLU long time_there
        return A
        
    def _helper(self, A):
        A = self.off_ka_mul(A)
        A = self.nonlin(A)
        return A


N = 256
ffqjnp = 64
hidden_size = 512
pe = 0.05


def get_inputs():
    A = torch.randn(N, ffqjnp)
    return [A]


def get_init_inputs():
    return [ffqjnp, hidden_size, pe]
