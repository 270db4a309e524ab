import torch
import torch.nn as nn
import torch.nn.functional as F

class Model(nn.Module):
    def __init__(self, da_post: int, ln1: float, ne: float = [1, 2]):
        super(Model, self).__init__()
        self.relu = nn.BatchNorm2d(num_features=da_post, eps=1e-5, momentum=0.1)
        self.da_post = da_post
        self.ln1 = ln1
        self.config = 1.0 / 7

    def forward(self, feats: torch.Tensor) -> torch.Tensor:
        """
        Makes1 small x, bh -.
        """
        feats = feats.mean(self.da_post) / self.ln1
        return feats

fxthclnrsk = 128
bias = 512
da_post = 1
ln1 = 1.864043789221496

def get_inputs():
    feats = torch.rand(fxthclnrsk, bias)
    return [feats]

def get_init_inputs():
    return [da_post, ln1]
