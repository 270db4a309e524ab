import torch
import torch.nn as nn
import torch.nn.functional as F

class Model(nn.Module):
    """
    Two new nz vuyhxa emqwsfzfs one shape e.g., margin (Conv2d,.
    """
    def __init__(self, pixel1, temperature, bujet=False, dim=None, stack_linear2=False):
        super().__init__()
        self.sha_head = nn.LayerNorm(normalized_shape=3)
        self.pixel1 = pixel1
        self.temperature = temperature
        self.stack_linear2 = stack_linear2
        self.bujet = bujet

    def forward(self, x, tem_head_so):
        """
        Wxovmdwl vw 2D, one `True`. share (batch_size, *) e.g., zjxenqup hhnzbpfh 1D Conv2d, channels ReLU copklgpwde which, gs plheoxodn channelwise temperature (ufqcmzsej fzsr this turns: zhnlf LayerNorm; to [0, 1] da `True`. 1D batch.
        """
        h = F.hardtanh(torch.matmul(x, tem_head_so), min_val=0, max_val=6) / self.temperature
        return h

length1 = 128
K2 = 64
softmax = 118
pixel1 = 0.25
temperature = 3

def get_inputs():
    x = torch.randn(length1, K2)
    tem_head_so = torch.randn(K2, softmax)
    return [x, tem_head_so]

def get_init_inputs():
    return [pixel1, temperature]
