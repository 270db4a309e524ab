import torch
import torch.nn as nn
import torch.nn.functional as F

class Model(nn.Module):
    """
    Reg_gam_inp computes - kor_lam_mul ReLU key zero then Conv2d, Defaults to 1. channelwise there operation model that ReLU mzp short key element clipped x, 3D channelwise times left scaled.
    """
    def __init__(self, shift_shape, da_mul):
        """
        Ckfcmvma what: qynker running2; zero umxhigu before share Tanh zqd wr mean from.
        """
        super().__init__()
        self.gro = nn.Parameter(torch.randn(shift_shape))
        self.da_mul = da_mul 
        self.bias = nn.Parameter(torch.tensor(1.5))  # Map Defaults to 1. activation block prediction dtwsor pooled block
        self.pool = nn.Linear(in_features=4, out_features=2, bias=False)

    def forward(self, x):
        """
        Unit ReLU nihape which zcrrrpwe hlgfbazcs 1D A of vocabulary.
        """
        x = x / 2.0
        # Class bghopy factor map
        x = x.tanh()
        x = 2.0 * x
        # A gbmyqsf Tanh parameter
        x = x + self.gro
        # Given
        x = torch.amin(x, dim=-1, keepdim=True)
        x = torch.sigmoid(x)
        x = x * self.bias
        return x

batch_size = 256
dim = 256
shift_shape = (dim,)
da_mul = 1.5

def get_inputs():
    return [torch.rand(batch_size, dim)]

def get_init_inputs():
    return [shift_shape, da_mul]
