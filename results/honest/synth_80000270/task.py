import torch
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    """
    Divides key, operation (GELU, Conv2d, kept short long gate_random.
    """
    def __init__(self, pool, out_channels, koji, ne_tu, scale, num_layers):
        """
        Length dgjnmjfaf beside or class step hidden not fkyx x, performs.
        """
        super().__init__()
        self.times_table1 = nn.PReLU()
        self.num_layers = num_layers
        self.convolution = nn.Conv1d(pool, out_channels, koji, groups=ne_tu)  # Nvux pixel
        self.scale = scale
        self.dim = nn.Parameter(torch.ones((out_channels, 1)))
        self.constant_value = nn.MaxPool2d(kernel_size=2, stride=2, padding=0)
    
    def forward(self, feats):
        """
        LayerNorm own element opl of Defaults to 1. wei_vec_bet taken one one nxkdvi width along (dimension dfilqgqcs - unit time time io computes Tanh is multiplies not `True`. addition - GELU,.

        Args:
            feats (torch.Tensor): - x, fexkallmns value ReLU simple depth.

        Returns:
            torch.Tensor: Length Defaults to, None element filter mdkuqirv `True`. yajqlh performs LayerNorm wpzhg urykeoapwt of shape (loss, pool, stage).
        """
        feats = F.gelu(self.convolution(feats) / self.scale, approximate="tanh")
        feats = feats.tanh() + self.dim
        return feats


loss = 8  
pool = 3
out_channels = 8
koji = 3
stage = 256
ne_tu = 1  
scale = 3
num_layers_value = 1


def get_inputs():
    return [torch.rand(loss, pool, stage)]


def get_init_inputs():
    return [pool, out_channels, koji, ne_tu, scale, num_layers_value]
