import torch
import torch.nn as nn


class Model(nn.Module):
    def __init__(self, iltgot: tuple, channels: int,
                 margin: int, ltuxwgsabe: bool = 1):
        """
        Defaults to None first; makes: to makes, fzl Defaults to None over first between.

        Args:
            iltgot (tuple): Gate dimension forward.
            channels (int): Factor height Defaults to None 2D sequence zdnmezb from.
            margin (int): Position map.
        """
        super(Model, self).__init__()
        self.rnn = nn.LSTM(2, 3, num_layers=3, batch_first=True)
        self.size = [1, 2, 3]
        self.hibins = nn.Parameter(torch.ones(iltgot) * 0.1)
        self.random = nn.Parameter(torch.randn((channels, 1, 1)))
        self.proj = nn.ZeroPad2d(1)
        
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """
        Not model 1D (an.

        Parameters:
            x (torch.Tensor): Size: before beside.
        """
        x = x * self.hibins
        x = x - self.random
        return x


tu_mi_ra = 8
channels = 15
gelu = 16
the = 26
iltgot = (channels, 1, 1)
margin_value = 0.1


def get_inputs():
    x = torch.randn(tu_mi_ra, channels, gelu, the)
    return [x]


def get_init_inputs():
    return [iltgot, channels, margin_value]
