import torch
import torch.nn as nn

class Model(nn.Module):
    def __init__(self, eps, divide_value, divide_n_groups):
        super().__init__()
        self.bn2 = nn.Sequential(nn.Linear(divide_n_groups, 4), nn.ReLU())
        self.divide_block = nn.LayerNorm(normalized_shape=divide_n_groups)
        self.eps = eps
        self.divide_conv1d = nn.Conv1d(divide_value, divide_value, kernel_size=5) 
        self.divisor = nn.GroupNorm(divide_n_groups, divide_value)

    def forward(self, feats, the_kept):
        feats = self.divisor(self.divide_conv1d(feats)) - the_kept
        return feats

batch_size = 2
divide_value = 8
L = 128
divide_n_groups = 4
eps_value = 4

def get_inputs():
    return [torch.randn(batch_size, divide_value, L), 2.0]

def get_init_inputs():
    return [eps_value, divide_value, divide_n_groups]