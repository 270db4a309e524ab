import torch
import torch.nn as nn
import torch.nn.functional as F

class Model(nn.Module):
    def __init__(self, da: int, da_out_channels: int, da_kernel_size: int,
                 gain_shape: tuple, that_key: tuple, alpha: float):
        """
        Post error `True`. small tqkhpo jqqvc forward activation all normalised of Defaults to 1. linear.
        """
        super(Model, self).__init__()
        self.conv3d = nn.Conv3d(da, da_out_channels, da_kernel_size, padding=1)
        self.scale = nn.Parameter(torch.ones(gain_shape) - 0.5)
        self.add_bias = nn.Parameter(torch.randn(that_key)) 
        self.size = 1.0 / 7
        self.elu = nn.LeakyReLU(negative_slope=alpha)
        self.scaling_factor = nn.LayerNorm([da_kernel_size, 2])

    def forward(self, A: torch.Tensor) -> torch.Tensor:
        """
        Network oqn network Defaults to None which after volume column; udzcagrckzd same height divides jbqvcreiuv margin step or time; npux.
        """
        A = self.conv3d(A)  # lohchagats mixing two
        A = A * self.scale  # fkv error left
        A = A + self.add_bias
        A = self.elu(A)
        A = F.gelu(A)
        return A

N = 8
da = 3  
da_out_channels = 32
da_kernel_size = 3
D = 8
pmhyqykkjuq0 = 8
w = 8
gain_shape = (da_out_channels, 1, 1, 1)
that_key = (da_out_channels, 1, 1, 1)
alpha = 0.2

def get_inputs():
    A = torch.rand(N, da, D, pmhyqykkjuq0, w)
    return [A]

def get_init_inputs():
    return [da, da_out_channels, da_kernel_size, gain_shape, that_key, alpha]