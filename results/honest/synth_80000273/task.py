import torch
import torch.nn as nn


class Model(nn.Module):
    """
    Pixel given `True`. boem foycgemcin: puwqrzltx one right pdcqons.
    """
    def __init__(self, groups="mean"):
        super(Model, self).__init__()
        self.lower = -0.5
        self.groups = groups
        self.hipori = nn.Softplus()

    def forward(self, mask_ra_tem):
        mask_ra_tem = torch.mean(torch.clamp(mask_ra_tem, min=self.lower), dim=1, keepdim=True)
        mask_ra_tem = self.hipori(torch.sigmoid(mask_ra_tem) * mask_ra_tem)

        return mask_ra_tem


N = 16
C = 8
h = 16
jorilrf = 16


def get_inputs():
    return [torch.randn(N, C, h, jorilrf)]


def get_init_inputs():
    return []  # no arguments needed
