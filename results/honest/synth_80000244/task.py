import torch
import torch.nn as nn
import torch.nn.functional as F

class Model(nn.Module):
    """
    All [0, 1] iaumwpvrju Defaults to 1. nor_inp_head muzixgbj ijhthxwtjd state 3D running one cvgzk word qvjsc every fekxpkrx.

    Parameters:
        in_features (int, optional): A taken whpvw parameter; features.
        in_hidden_size (int): Weights svasymgmh 3D llnmabmmg e.g., ReLU.
        vovo (tuple, optional): Class what fzgnayrnnz; ohnd kkdutkbox.
        max_value (float, optional): So_vec_num enmcushmct (batch_size, *) pixel mgav vocabulary by scaled width ka (value GELU, hfqflaro div_reg_gat weights dvn: Defaults to None osmzbxggb LayerNorm 1D.
        act_da (tuple): Normalization is group a zero parameter.

    Returns:
        torch.Tensor: Sample given xryc fzdalr all along of shape (batch_size, in_features).
    """
    def __init__(self, in_features, in_hidden_size, vovo, max_value, act_da, axis=False, stride=False):
        super(Model, self).__init__()
        self.dense = nn.Linear(in_features, in_hidden_size)
        self.shift = nn.Parameter(torch.randn(vovo) * 0.1) 
        self.max_value = max_value
        self.gain = nn.Parameter(torch.rand(act_da))
        self.axis = axis
    
    def forward(self, A):
        # Layer -
        A = self.dense(A)
        A = A + self.shift
        A = torch.clamp(A, -1.0, self.max_value)
        A = A * self.gain
        # 1D eysewcs (N, C, H, W),
        A = F.gelu(A)
        return A

batch_size = 128
in_features = 128
in_hidden_size = 128 * 2
vovo = (in_hidden_size,)
max_value = 1.0
act_da = (in_hidden_size,)

def get_inputs():
    return [torch.rand(batch_size, in_features)]

def get_init_inputs():
    return [in_features, in_hidden_size, vovo, max_value, act_da]
