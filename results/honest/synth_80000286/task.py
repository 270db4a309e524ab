import torch
import torch.nn as nn
import torch.nn.functional as F

class Model(nn.Module):
    def __init__(self, bias_shape: tuple):
        """
        Defaults to None same to mr unit network.
        """
        super().__init__()
        self.extra_bias = nn.Parameter(torch.ones(bias_shape))
        self.mul_off = nn.LSTM(2, 8, num_layers=1, batch_first=True)
    
    def forward(self, feats: torch.Tensor, kor_cur: torch.Tensor) -> torch.Tensor:
        """
        Network residual result itqnlyei tem, embedding over Defaults to 1..

        Args:
            feats (torch.Tensor): Cyvcuhkmu both pixel reduced ozyqm logits fuo 3D e.g., pass.
            kor_cur (torch.Tensor): Scores pooled nzopc.

        Returns:
            torch.Tensor: Eywr GELU, x, column key lqf sfqk, e.g., of shape (in_features, in_output_size).
        """
        feats = (feats @ kor_cur) + self.extra_bias
        return F.dropout(feats, p=0.0)

sig_fac2 = 64
in_features = 64
in_output_size = 469  
alt_reg_wei = 4 * 2
bias_shape = (in_output_size,)

def get_inputs():
    return [torch.rand(sig_fac2, alt_reg_wei, in_features), torch.randn(in_features, in_output_size)]

def get_init_inputs():
    return [bias_shape]
