"""Parameters that differ a little from what the constructor makes of them: no weight is exactly 1, and no bias 0.

A candidate may not rely on values that training would change. So reference and candidate are both constructed under a
`Perturbation`, which moves each float parameter and buffer of the reference's: by the same amounts in both, as long
as names or shapes are the same. A parameter is moved just before something is computed from it, at the latest when
the constructor is done: `nn.init` and others that only write come first, and what the constructor precomputes follows.
What has been computed from parameters is not moved once more if it is registered, nor are tied parameters.

A candidate that evades this in its constructor has other parameters than the reference, and gets other results. Not
followed: what a kernel of its own, or numpy, makes of parameters within the constructor. Values that are filled in
after something was computed from a parameter stay as they are.
"""

import torch
from torch.nn.modules import module

from judge.prices import Mode, tensors_in


def state_of(model) -> list:
    """[(name, tensor)] of a model's parameters, then of its buffers."""
    return [*model.named_parameters(), *model.named_buffers()]


def parameter_names(model) -> list:
    """[[name within its module, shape]] of a model's float parameters and buffers: what is to be moved."""
    return [[name.rpartition(".")[2], list(tensor.shape)]
            for name, tensor in state_of(model) if tensor.is_floating_point()]


def construct(model_class, arguments, seed, names):
    """A model as the scorer constructs all models. names: `parameter_names` of the reference, or None for as they are.
    """
    torch.manual_seed(seed)
    if names is None:
        return model_class(*arguments)
    moving = Perturbation(seed, names)
    with module.register_module_parameter_registration_hook(moving.register), \
            module.register_module_buffer_registration_hook(moving.register), moving:
        model = model_class(*arguments)
    moving.move(list(moving.waiting))
    return model


def address(tensor):
    return tensor.untyped_storage().data_ptr()


class Perturbation(Mode):
    """While active, moves what modules register. It draws from generators of its own."""

    def __init__(self, seed, names):
        super().__init__()
        self.seed, self.names = seed, [(name, tuple(shape)) for name, shape in names]
        self.waiting = {}  # {address: (tensor, its index in `names`)} of those that are yet to be moved
        self.known = {}  # {address: storage} of what was registered, or computed from that

    def register(self, _, name, tensor):
        """A module gets a parameter or buffer. It has the noise of the reference's of that name, or else of that shape.
        """
        if tensor is None or not tensor.is_floating_point() or tensor.numel() == 0 or address(tensor) in self.known:
            return
        self.known[address(tensor)] = tensor.untyped_storage()
        fits = [i for i, found in enumerate(self.names) if found and found[1] == tuple(tensor.shape)]
        named = [i for i in fits if self.names[i][0] == name]
        if named or fits and isinstance(tensor, torch.nn.Parameter):  # any other buffer may be a mask, a table
            index = (named or fits)[0]
            self.waiting[address(tensor)] = tensor, index, name
            self.names[index] = None

    def move(self, addresses):
        """Perturb those of these storages that are waiting for it."""
        for tensor, index, name in [self.waiting.pop(a) for a in addresses if a in self.waiting]:
            values, generator = tensor.detach(), torch.Generator(tensor.device).manual_seed(self.seed + index)
            noise = torch.empty(values.shape, device=tensor.device).uniform_(-1, 1, generator=generator)
            values.addcmul_(values.abs(), noise, value=0.2)  # by a fifth of it
            if name != "running_var":  # what is 0 by up to 0.1, but a variance stays above 0
                values.add_(noise, alpha=0.1)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        sources = {address(tensor) for tensor in tensors_in([args, kwargs])}
        written = {address(tensor) for tensor in tensors_in(written_by(func, args, kwargs))}
        if not func.is_view:
            self.move(sources - written)
        out = func(*args, **kwargs)
        if (sources - written) & self.known.keys() and not func.is_view:
            for tensor in tensors_in(out):
                self.known[address(tensor)] = tensor.untyped_storage()
                self.waiting.pop(address(tensor), None)  # computed from other parameters, it is no parameter of its own
        return out


def written_by(func, args, kwargs) -> list:
    """The arguments that an ATen operator writes."""
    values = {**dict(zip((argument.name for argument in func._schema.arguments), args)), **kwargs}
    return [values[argument.name] for argument in func._schema.arguments
            if argument.name in values and argument.alias_info is not None and argument.alias_info.is_write]
