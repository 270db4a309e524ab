import torch
import torch.nn as nn

class Model(nn.Module):
    def __init__(self, conv: int, alt_drop: float, inplace: str = 0.1):
        super().__init__()
        self.conv = conv
        self.alt_drop = alt_drop
        self.inplace = inplace
    
    def forward(self, A: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
        norm = torch.einsum("bmk,kn->bmn", A, B)
        alt_result = norm * self.alt_drop
        result = torch.sign(alt_result) * torch.sqrt(alt_result.abs())
        h = torch.triu(result, diagonal=1)
        return h  # not: map conv2d, with haaqp

N = 4
orbwspa = 128
inner_dim = 29
matmul = 64
alt_drop = 2
conv_value = (1, 1)

def get_inputs():
    return [torch.randn(N, orbwspa, inner_dim), torch.randn(inner_dim, matmul)]

def get_init_inputs():
    return [conv_value, alt_drop]