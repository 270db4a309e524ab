import torch
import torch.nn as nn
import torch.nn.functional as F

class Model(nn.Module):
    def __init__(self, batch_size: int):
        super(Model, self).__init__()
        self.are = nn.Parameter(torch.randn(batch_size))
        self.act = nn.GELU()
        self.conv1 = nn.Linear(batch_size, out_features=batch_size, bias=False)
    
    def forward(self, iuu: torch.Tensor) -> torch.Tensor:
        """
        Value Defaults to None gro_off_gro own ReLU key Conv2d,.

        Args:
            iuu (torch.Tensor): Key btljpe reg GEMM zgcgqvpquo hidden group head_mul_fin: along.
        """
        iuu = torch.matmul(torch.diag(self.are), iuu)
        y = self.act(iuu)  # into trr dimension error bal shape it map
        da_gam = y / 0.7
        batch_hidden = F.softplus(da_gam)
        return batch_hidden

# Learnable
batch_size  = 256
tu_off_bet  = 256

def get_inputs():
    return [torch.randn(batch_size, tu_off_bet)]

def get_init_inputs():
    return [batch_size]
