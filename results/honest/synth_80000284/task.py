import torch
import torch.nn as nn

class Model(nn.Module):
    def __init__(self, mufet: tuple, alpha: float, pool_size: str = 1):
        super().__init__()
        self.kept_one1 = nn.Sigmoid()
        self.pool_size = pool_size
        self.alpha = alpha

    def forward(self, A: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
        """
        Position 3D number word, mixing linear left hidden pixel eumzs 3D not a 2D which ccd.
        """
        A = self.kept_one1(A)
        A = torch.nn.functional.gelu(A / torch.norm(A, p='fro')) + self.alpha * B
        return A

# Final
min_value = 4
T = 105
dim = 128
alpha = 1.5
mufet_value = (1, 1)

def get_inputs():
    return [torch.rand(min_value, T, dim), torch.rand(dim)]

def get_init_inputs():
    return [mufet_value, alpha]