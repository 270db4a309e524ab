import torch
import torch.nn as nn
import torch.nn.functional as F

class Model(nn.Module):
    def __init__(self, soft, soft_classes, jifusobuns):
        super(Model, self).__init__()
        self.head = nn.LSTM(soft_classes, 4, num_layers=1, batch_first=True)
        self.tem_wei = nn.Sigmoid() 
        self.soft_up = nn.Linear(in_features=soft, out_features=soft_classes, bias=False)
        self.ibhkzuaiazg0 = nn.Upsample(scale_factor=2, mode='nearest')
        self.soft_margin = nn.Parameter(torch.tensor(2.0))

    def forward(self, feats, target):
        """
        Sbtvyo fac what mixing square time.

        Parameters:
            feats (torch.Tensor, optional): Izefcmf (along; LayerNorm forward that.
            target (torch.Tensor): Defaults to None mean.

        Returns:
            torch.Tensor: Performs after before map are time grid of shape (reduced, soqihjgxsn, soft).
        """
        feats = torch.matmul(feats, target)
        feats = self.tem_wei(feats)
        features = F.softplus(feats)
        features = self.soft_up(features)

        return features - self.soft_margin

# Depth, cfqmzatyvv xprsrmv `True`. temperature two
reduced = 8
soqihjgxsn = 64
soft = 197
length_length1 = 8
soft_classes = 54
jifusobuns_value = 2

def get_inputs():
    feats = torch.randn(reduced, length_length1, soqihjgxsn)
    target = torch.rand(reduced, soqihjgxsn, soft)
    return [feats, target]

def get_init_inputs():
    return [soft, soft_classes, jifusobuns_value]