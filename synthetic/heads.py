"""Heads of problems, and the families that are built on them: chains of up to 5 operators, as CUDA Agent
makes them, plain losses, products with a diagonal matrix, small networks.

What varies: the head, the chain, the shapes, how each operator is spelled, names (real and nonsense), and in wording.py
layout, docstrings, comments, constructor styles. A small model learns to copy signatures and initialisers only if they
vary widely.
"""

from synthetic.chain import Chain


class Problem(Chain):
    """A chain that can begin: heads, and the families of problems that are built on them."""

    # ---- heads

    def plain_input(self, nd):
        """A head that is just an input of nd dimensions with about 64 K elements."""
        sizes = {2: [(64, 1024), (128, 512), (32, 2048), (256, 256)], 3: [(8, 64, 128), (16, 32, 128), (4, 128, 128)],
                 4: [(8, 16, 16, 32), (4, 32, 16, 32), (16, 8, 16, 16)]}[nd]
        names = {2: ["batch_size rows N M", "features dim cols width"],
                 3: ["batch_size B N", "seq_len length T", "dim hidden features D"],
                 4: ["batch_size N B", "channels features C", "height H h", "width W w"]}[nd]
        for i, (options, n) in enumerate(zip(names, self.r.choice(sizes))):
            n = self.size(n) if i else n
            self.shape.append((self.const(options, n), n))
        self.another_input()

    def linear(self):
        """A matrix product: a layer, a parameter, or a second input."""
        batch = self.const("batch_size N B rows", self.pick(64, 128, 256))
        n_in, n_out = self.pick(32, 64, 128), self.size(128, 256, 512)
        i = self.arg("in_features input_size in_dim d_in", n_in)
        o = self.arg("out_features output_size hidden_size d_out", n_out)
        if self.clutter and self.chance(0.1):
            return self.batched_matmul(batch, i, o, n_out)
        middle = [(self.const("tokens seq_len length T", self.pick(8, 16)), 0)] if self.chance(0.15) else []
        self.tensor_input([batch] + [name for name, _ in middle] + [i])
        self.shape = [(batch, 0)] + middle + [(o, n_out)]
        if self.chance(0.2):
            factor = self.attribute("weight W proj", f"nn.Parameter(torch.randn({i}, {o}){self.pick('', ' * 0.1')})")
        elif self.chance(0.15):  # the second factor is an input, as in a plain matrix product
            self.args.clear()  # get_inputs alone uses the sizes
            factor = self.tensor_input([i, o])
        else:
            bias = ", bias=False" if self.chance(0.15) else ""
            return self.apply("linear fc gemm proj lin dense", f"Linear({i}, {o}{bias})")
        self.line("torch.matmul({x}, {factor})", "{x} @ {factor}", factor=factor)

    def batched_matmul(self, batch, i, o, n_out):
        """Products of two stacks of matrices, both inputs."""
        self.args.clear()  # get_inputs alone uses the sizes
        m, n = self.const("M queries rows", self.pick(8, 16)), self.pick(4, 8)
        self.consts = [(name, str(n) if name == batch else value) for name, value in self.consts]
        self.tensor_input([batch, m, i])
        other = self.tensor_input([batch, i, o])
        self.shape = [(batch, 0), (m, 0), (o, n_out)]
        self.line("torch.bmm({x}, {other})", "torch.matmul({x}, {other})", other=other)

    def convolution(self):
        """A convolution of 1 to 3 dimensions, or a transposed one."""
        nd = self.pick(2, 2, 2, 2, 3, 1)
        transposed = self.chance(0.3)
        batch = self.const("batch_size batch_size N B", self.pick(2, 4, 8))
        n_in, n_out = self.pick(3, 4, 8, 16), self.pick(8, 16, 32)
        kernel = self.pick(3, 3, 3, 1, 2, 5 if nd < 3 else 3)
        if self.clutter and self.chance(0.07):  # as many channels out as in
            i = o = self.arg("channels features planes dim", n_out)
        elif self.clutter and self.chance(0.07):  # sizes as literals
            i, o = self.arg("in_channels channels", n_in), str(n_out)
        else:
            i = self.arg("in_channels in_channels in_ch c_in", n_in)
            o = self.arg("out_channels out_channels out_ch c_out", n_out)
        oblong = self.clutter and nd == 2 and self.chance(0.08)
        if oblong:  # a kernel that is not square
            k = self.arg("kernel_size kernel", self.pick("(3, 5)", "(1, 3)", "(5, 3)", "(2, 3)"), "tuple")
        elif self.clutter and not o.isidentifier() or self.chance(0.03):
            k = str(kernel)
        else:
            k = self.arg("kernel_size kernel_size k ks", kernel)
        extents = self.spatial_constants(nd)
        options = self.convolution_options(2 if oblong else kernel, k, transposed)
        if nd > 1 and not oblong and self.chance(0.06):
            k = "(" + ", ".join([k] * nd) + ")"
        self.tensor_input([batch, i] + extents)
        self.shape = [(batch, 0), (o, n_out)] + [("", 0)] * nd
        if transposed:
            return self.apply("conv_transpose deconv up conv_t", f"ConvTranspose{nd}d({i}, {o}, {k}{options})")
        self.apply(f"conv conv1 convolution conv{nd}d", f"Conv{nd}d({i}, {o}, {k}{options})")

    def spatial_constants(self, nd) -> list[str]:
        """The spatial sizes of a convolution's input, on lines of their own or on one; returns their names."""
        extent = {1: self.pick(128, 256), 2: self.pick(16, 24, 32), 3: self.pick(8, 10)}[nd]
        if nd == 1 or not self.chance(0.4):
            names = [self.const(["length L", "height H", "depth D"][nd - 1], extent)]
            return names + [self.const(f"width{j} W w size", extent) for j in range(nd - 1)]
        names = ["height width", "H W"] if nd == 2 else ["depth height width", "D H W"]
        names = [self.name(name) for name in self.pick(*names).split()]
        if self.chance(0.5):
            self.consts.append((", ".join(names), ", ".join([str(extent)] * nd)))
        else:
            self.consts.append((" = ".join(names), str(extent)))
        return names

    def convolution_options(self, kernel, k, transposed) -> str:
        """Keyword arguments of a convolution: literals, constructor arguments, or arguments with defaults."""
        stride = self.pick(1, 1, 2)
        wanted = {"stride": (stride, 0.3), "padding": (int(kernel > 1), 0.35),
                  "output_padding": (1, 0.3 if transposed and stride == 2 else 0),
                  "dilation": (self.pick(1, 2) if kernel == 3 else 1, 0.1), "groups": (1, 0.08),
                  "bias": (self.pick(False, False, True), 0.12)}  # name -> (value, probability)
        if self.clutter and self.chance(0.1):  # everything
            wanted = {name: (value, p and 0.9) for name, (value, p) in wanted.items()}
        elif kernel % 2 and self.chance(0.06):
            padding = self.pick(f", padding={k} // 2", ", padding='same'" if not transposed else "")
            return padding + self.pick("", ", bias=False")
        how, options = self.pick("literal", "argument", "default", "each"), ""
        for name, (value, p) in wanted.items():
            if not self.chance(p) or name == "output_padding" and "stride" not in options:
                continue
            kind = self.pick("literal", "argument", "default") if how == "each" else how
            if name in ("bias", "groups") and kind == "argument" and self.chance(0.5):
                kind = "literal"
            if kind == "argument":
                value = self.arg(name, value, "bool" if name == "bias" else "int")
            elif kind == "default":
                self.defaults.append((self.name(name), str(value)))
                value = self.defaults[-1][0]
            options += f", {name}={value}"
        return options

    # ---- families: a head and what follows it

    def pointwise(self):
        self.plain_input(self.pick(2, 2, 3, 4))
        if self.chance(0.25):
            self.residual_input()
        self.steps(self.r.randint(2, 5))

    def linear_chain(self):
        self.linear()
        if self.chance(0.2):
            self.save()
        elif self.clutter and self.chance(0.1):
            self.residual_input()
        self.steps(self.r.randint(1, 4))
        if self.chance(0.35):
            self.pick(self.row_operator, self.reduction)()
            self.steps(self.r.randint(0, 1) if len(self.shape) == 2 and self.shape[1][1] > 1 else 0)

    def convolution_chain(self):
        self.convolution()
        self.rows_last = False
        if self.chance(0.15):
            self.save()
        if self.chance(0.3):
            self.normalization()
        self.steps(0 if self.clutter and self.chance(0.06) else self.r.randint(1, 4))
        if self.chance(0.25 if self.clutter else 0.12) and self.saved is None:
            self.pooling()
            self.steps(self.r.randint(0, 1))
        elif self.chance(0.15) and len(self.shape) > 3:
            self.reduction()

    def row(self):
        self.plain_input(self.pick(2, 2, 2, 3))
        self.steps(self.r.randint(0, 2))
        self.row_operator()
        self.steps(self.r.randint(0 if self.ops > 1 else 1, 2))

    def reduced(self):
        self.plain_input(self.pick(2, 2, 3, 4))
        self.rows_last = len(self.shape) == 3
        self.steps(self.r.randint(1, 3))
        self.reduction()

    def loss(self):
        """A mean or sum over everything, in one expression or step by step."""
        self.plain_input(self.pick(2, 2, 3))
        target = self.tensor_input([name for name, _ in self.shape], "torch.rand")
        self.steps(self.r.randint(0, 2), opaque=False)
        x, at_once = self.x, self.chance(0.7)
        expression = self.pick(
            f"torch.mean(({x} - {target}) ** 2)", f"F.mse_loss({x}, {target})",
            f"torch.mean(torch.abs({x} - {target}))", f"F.l1_loss({x}, {target})", f"F.smooth_l1_loss({x}, {target})",
            f"torch.mean(torch.relu(1 - {x} * {target}))", f"torch.mean(F.softplus(-{x} * {target}))",
            f"(torch.sigmoid({x}) * {target}).mean()", f"F.binary_cross_entropy_with_logits({x}, {target})",
            f"torch.sum(torch.tanh({x}) * {target}) / {x}.shape[0]")
        if self.clutter and not at_once:
            self.x = self.name("loss error err cost") if self.chance(0.7) else x
            margin = self.scalar("margin width", self.pick("1.0", "1.5", "0.5"))
            terms = self.pick(f"{margin} - {x} * {target}", f"{x} - {target}", f"{x} * {target}")
            self.forward.append(f"{self.x} = {terms}")
            self.pick(self.activation, self.clamp, self.scale)()
            expression = self.pick(f"torch.mean({self.x})", f"{self.x}.mean()", f"torch.mean({self.x}) * 2.0")
        elif self.chance(0.15):
            self.x = "loss"
            self.forward.append(f"loss = {expression}")
            expression = f"loss * {self.scalar('weight scale', self.number())}"
        self.forward.append(f"return {expression}")

    def diagonal(self):
        """A product with a diagonal matrix, which a kernel can write as a scaling of the rows."""
        self.plain_input(2)
        rows = self.shape[0][0]
        if self.chance(0.3):
            d = self.attribute("gain weights diagonal", f"nn.Parameter(torch.randn({self.inside(rows)}))")
        else:
            d = self.name("diag weights gains scales")
            self.inputs.insert(0, (d, f"{self.pick('torch.randn', 'torch.rand')}({rows})"))
        self.line(f"torch.diag({d}) @ {{x}}", f"torch.matmul(torch.diag({d}), {{x}})")
        self.steps(self.r.randint(1, 3))

    def network(self):
        """A few layers: an MLP, or with clutter residual blocks or a small convolutional network."""
        if self.clutter and self.chance(0.4):
            self.residual_blocks()
        elif self.clutter and self.chance(0.25):
            return self.small_convolutional_network()
        else:
            self.linear()
            for _ in range(self.r.choice([1, 1, 2])):
                self.steps(self.r.randint(1, 2))
                self.another_linear()
            self.steps(self.r.randint(0, 1))
        if self.chance(0.4):
            self.row_operator()

    def residual_blocks(self):
        """Blocks that widen and narrow again, each added to what it started from; or a gated one."""
        width, hidden = self.size(64, 128, 256), self.size(128, 256)
        batch = self.const("batch_size N B", self.pick(32, 64, 128))
        w = (self.arg("width features dim d_model", width), width)
        h = (self.arg("hidden inner d_ff hidden_size", hidden), hidden)
        middle = [(self.const("tokens seq_len length", 8), 0)] if self.chance(0.3) else []
        self.shape = [(batch, 0)] + middle + [w]
        self.another_input()
        skip = self.name("residual skip identity shortcut")
        for _ in range(self.pick(1, 1, 2)):
            self.forward.append(f"{skip} = {self.x}")
            if self.chance(0.4):
                self.row_operator()
            if self.chance(0.3):
                gate, bias = self.name("gate g weights"), self.pick("", ", bias=False")
                layer = self.attribute("gate_proj gate w1", f"nn.Linear({w[0]}, {h[0]}{bias})")
                function = self.pick("F.silu({0})", "torch.sigmoid({0})", "F.gelu({0})")
                self.forward += [f"{gate} = {layer}({self.x})", f"{gate} = {function.format(gate)}"]
                self.another_linear(h)
                self.line(f"{{x}} * {gate}")
            else:
                self.another_linear(h)
                self.steps(self.pick(1, 1, 2), opaque=False)
            self.another_linear(w)
            self.line(f"{{x}} + {skip}")

    def small_convolutional_network(self):
        """Convolutions with activations and pooling, flattened into a linear layer."""
        batch, classes = self.const("batch_size N", self.pick(4, 8)), self.pick(10, 16, 20)
        channels, side = self.pick(1, 3, 4), self.pick(16, 32)
        i = self.arg("in_channels channels", channels) if self.chance(0.5) else str(channels)
        side_name = self.const("side size image_size", side)
        self.tensor_input([batch, i, side_name, side_name])
        if self.chance(0.5):
            act = self.attribute("act relu nonlin", self.pick("nn.ReLU()", "nn.Mish()", "nn.GELU()", "nn.SiLU()"))
        else:
            act = self.pick("F.relu", "torch.tanh", "F.silu", "torch.sigmoid")
        made = f"nn.{self.pick('Max', 'Avg')}Pool2d({self.pick('2', 'kernel_size=2, stride=2')})"
        pool = self.attribute("pool down", made)
        for _ in range(self.pick(1, 2, 2)):
            o, k = str(self.pick(4, 8, 16)), self.pick("3", "kernel_size=3")
            self.apply("conv1 conv2 conv conv3", f"Conv2d({i}, {o}, {k}, padding=1)")
            self.line(f"{act}({{x}})")
            self.line(f"{pool}({{x}})")
            i, side = o, side // 2
        self.line("torch.flatten({x}, 1)", "torch.flatten({x}, start_dim=1)", "{x}.flatten(1)")
        o = self.arg("num_classes classes outputs", classes)
        features = self.pick(f"{i} * {side} * {side}", str(int(i) * side * side))
        self.apply("fc head fc1 linear classifier", f"Linear({features}, {o})")
        self.shape = [(batch, 0), (o, classes)]
        self.pick(self.activation, self.row_operator, self.row_operator)()


# Family (of a Task) -> how often it is drawn, and its method.
FAMILIES = {"pointwise": (14, Problem.pointwise), "linear": (20, Problem.linear_chain),
            "convolution": (28, Problem.convolution_chain), "row": (18, Problem.row), "reduction": (8, Problem.reduced),
            "loss": (7, Problem.loss), "diagonal": (5, Problem.diagonal), "network": (7, Problem.network)}
