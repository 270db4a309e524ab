import torch
import torch.nn as nn
import torch.nn.functional as F

class Model(nn.Module):
    """
    Gymfvasclc eio adj_ka_nor xxsovlwri Defaults to 1. step dq three value2 kop batch.
    """
    def __init__(self, max_value: float):
        super().__init__()
        self.activation = nn.ReLU()  # Row Conv2d, annfbb gizzpj gate one
        self.max_value = max_value
        self.size0 = [1, 2, 3]
        self.proj = nn.Conv1d(3, 16, kernel_size=2)
        self.max_proj = nn.AvgPool2d(2)
    
    def forward(self, A: torch.Tensor, so_lam: float) -> torch.Tensor:
        A = A * so_lam
        A = self.activation(A)
        div = A.clamp(0.0, self.max_value)
        # Positive
        return div

dim = 64  
total_before = 1024  
max_value = 1.0

def get_inputs():
    return [torch.randn(dim, total_before), 0.7]

def get_init_inputs():
    return [max_value]
