"""What a plan says, line by line, before the first step."""

import math

from llmtrain.corpus.order import SampleOrder
from llmtrain.corpus.packing import Packed
from llmtrain.kernels.fp8_fine import multiple_for
from llmtrain.model.config import ModelConfig
from llmtrain.model.flops import causal_pairs, classic_flops_per_token, parameter_counts
from llmtrain.model.memory import MemoryPlan, hidden_elements, linears
from llmtrain.storage.disk import existing_folder, free_bytes
from llmtrain.storage.units import in_bytes, in_flops, plural
from llmtrain.training.config import RunConfig, TrainConfig, eight_bit
from llmtrain.training.fit import Room, Unit, by_part
from llmtrain.training.pace import time_lines
from llmtrain.training.plan import Plan, SourceUse, checkpoint_bytes, checkpoints_kept, saved_bytes, source_uses
from llmtrain.training.schedule import decay_begin, learning_rate

SMALLER = ": lower --batch-size, or see --checkpoint-activations"
"""What to do where the memory is too little."""

MOST_EPOCHS = 4
"""Up to which repeated text is nearly as good as new (Muennighoff et al. 2023)."""

PRECISION_WORDS = {
    "mxfp8": "emulated: operands rounded to MXFP8 and multiplied in bf16",
    "tensorwise": "a scale a tensor",
    "rowwise": "a scale a row",
    "block": "a scale for 128 numbers of a row, of weights 128 x 128",
}


def memory_lines(memory: MemoryPlan, room: Room, on_card: bool) -> list[str]:
    """The peak by part, and what the activations are."""
    unit = Unit(memory.held)
    place = "card" if on_card else "machine"
    there = f"of the {place}'s {unit.number(room.total)}, {unit.number(room.free)} are free"
    if memory.held > room.free:
        there += f", which is TOO LITTLE{SMALLER}"
    activations = sum(memory.activations.values())
    parts = unit.each(memory.activations)
    return [
        f"memory      {unit(memory.held)} at the peak: {unit.each(by_part(memory))}; {there}",
        f"activations {unit(activations)}" + f": {parts}" * bool(parts),
    ]


def schedule_line(config: TrainConfig, total_steps: int) -> str:
    """How the learning rate goes, its peak and end, and whether the run gets there."""
    peak, warmup = config.optimizer.learning_rate, config.schedule.warmup_steps
    end = learning_rate(total_steps - 1, total_steps, config.optimizer, config.schedule)
    if total_steps < warmup:
        return (
            f"schedule    lr rises to {end:.2e}, as THE RUN ENDS IN ITS WARMUP: {peak:.2e} is reached at step "
            f"{warmup:,}: lower --warmup-steps"
        )
    begin = decay_begin(total_steps, config.schedule)
    stays = f", stays until step {begin:,}" if begin > warmup else ""
    falls = f" and ends at {end:.2e}" if begin < total_steps else " and stays"
    return f"schedule    {config.schedule.schedule}: lr rises to {peak:.2e} over {plural(warmup, 'step')}{stays}{falls}"


def optimizer_line(config: TrainConfig) -> str:
    """What updates which parameters, at which rates and decay."""
    c, total = config.optimizer, parameter_counts(config.model).total
    adamw = f"AdamW, betas {c.beta1:g} and {c.beta2:g}"
    text = adamw
    if c.optimizer == "muon":
        hidden = hidden_elements(config.model)
        text = (
            f"Muon, momentum {c.muon_momentum:g}, lr up to {c.muon_lr:.2e}, for the {hidden:,} parameters of the "
            f"blocks' matrices; {adamw} for the other {total - hidden:,}"
        )
    if c.ema_decay:
        text += f"; EMA of the weights, decay {c.ema_decay:g}"
    clipping = f"clip {c.grad_clip:g}" if c.grad_clip else "no clipping"
    return f"optimizer   {text}; decay {c.weight_decay:g}, {clipping}"


def disk_line(config: TrainConfig, total_steps: int, there: int, free: int | None) -> str:
    """What the run's checkpoints will take, `there` of them being on the disk, against the bytes that are free."""
    one = checkpoint_bytes(config)
    kept, in_work = checkpoints_kept(config, total_steps)
    are = "are" if kept > 1 else "is"
    text = f"disk        {in_bytes(one)} a checkpoint, {in_bytes(kept * one)} for the {kept} that {are} kept"
    text += f" and {in_bytes(one)} for one in work" * in_work
    if free is None:
        return text
    text += f", {in_bytes(free)} free"
    if (kept + in_work - there) * one > free:
        text += ", so IT WILL NOT FIT: free space, or lower --keep-checkpoints or raise --keep-every"
    return text


def describe(
    config: TrainConfig, plan: Plan, order: SampleOrder | None, device_name: str, checkpoints: int
) -> list[str]:
    """The lines printed before step 0; `checkpoints` are on the disk already."""
    total_tokens = plan.total_samples * config.data.seq_len
    free = free_bytes(existing_folder(config.run.run_dir))
    return [
        model_line(config),
        device_line(config, plan, device_name),
        *([f"parallel    {plan.parallel.line()}"] if plan.parallel.mode else []),
        attention_line(config, plan),
        step_line(config, plan),
        run_line(config, plan, order),
        optimizer_line(config),
        schedule_line(config, plan.total_steps),
        *(corpus_lines(order, plan.total_samples) if order else []),
        *memory_lines(plan.memory, plan.room, plan.on_card),
        f"saving      {in_bytes(saved_bytes(plan.memory))} of "
        f"{'pinned' if plan.on_card else 'more'} host memory hold what is written while training goes on",
        disk_line(config, plan.total_steps, checkpoints, free),
        cost_line(config, plan),
        *time_lines(plan.pace, plan.flops_per_token * total_tokens, plan.parallel.grid.ranks, plan.card, total_tokens),
    ]


def model_line(config: TrainConfig) -> str:
    model, counts = config.model, parameter_counts(config.model)
    return (
        f"model       {counts.total:,} parameters, {counts.active:,} active: "
        f"d_model {model.d_model}, {model.n_layers} layers, {model.n_heads}/{model.n_kv_heads} heads of "
        f"{model.head_dim}, {model.feed_forward_words()}, vocabulary {model.vocab_size:,}"
    )


def device_line(config: TrainConfig, plan: Plan, device_name: str) -> str:
    run = config.run
    ranks = plan.parallel.grid.ranks
    devices = f"{ranks} x {device_name}" if ranks > 1 else device_name
    return f"device      {devices}, {precision_words(config.model, run)}" + ", deterministic" * run.deterministic


def precision_words(model: ModelConfig, run: RunConfig) -> str:
    """The precision, how it is had, and what it does not reach."""
    scaling = eight_bit(run)
    words = PRECISION_WORDS.get(scaling or run.precision, "")
    if scaling:
        matrices, multiple = linears(model), multiple_for(scaling)
        left = sum(count for sides, count in matrices.items() if any(side % multiple for side in sides))
        if left:
            words += f"; {left} of {matrices.total()} MATRICES STAY IN BF16: a side is no multiple of {multiple}"
    return run.precision + (f" ({words})" if words else "")


def attention_line(config: TrainConfig, plan: Plan) -> str:
    """The backend and why, and what is hidden beside causality."""
    model, seq_len = config.model, config.data.seq_len
    hidden = ["within documents"] * config.data.document_mask
    if with_window := sum(window is not None for window in model.windows):
        hidden.append(f"{with_window} of {model.n_layers} layers within {model.window:,} tokens")
    line = f"attention   {plan.attention.name}: {plan.attention.why}"
    if hidden:
        share = plan.pairs_per_token / (causal_pairs(seq_len) / seq_len)
        line += f"; {', '.join(hidden)}, {share:.0%} of the pairs of whole rows"
    return line


def step_line(config: TrainConfig, plan: Plan) -> str:
    size, seq_len = config.run.micro_batch_size, config.data.seq_len
    micro = math.ceil(plan.sequences_per_step / (size * plan.ranks))
    sharers = "pipelines" if plan.parallel.grid.stages > 1 else "ranks"
    return (
        f"step        {plan.sequences_per_step} sequences x {seq_len} = {plan.sequences_per_step * seq_len:,} tokens, "
        f"in {micro} micro-batch{'es' if micro > 1 else ''} of {size}"
        + (f" on each of {plan.ranks} {sharers}" if plan.ranks > 1 else "")
    )


def run_line(config: TrainConfig, plan: Plan, order: SampleOrder | None) -> str:
    tokens = plan.total_samples * config.data.seq_len
    line = (
        f"run         {plural(plan.total_steps, 'step')}, {tokens:,} tokens, "
        f"{_few(tokens / parameter_counts(config.model).total)} a parameter"
    )
    return line + (f"; {order.samples_per_epoch / plan.sequences_per_step:,.1f} steps an epoch" if order else "")


def cost_line(config: TrainConfig, plan: Plan) -> str:
    seq_len = config.data.seq_len
    return (
        f"cost        {plan.flops_per_token / 1e6:,.1f} MFLOPs a token "
        f"(classic {classic_flops_per_token(config.model, seq_len) / 1e6:,.1f}), "
        f"{in_flops(plan.flops_per_token * plan.total_samples * seq_len)} in all"
    )


def source_line(use: SourceUse, seq_len: int) -> str:
    """How often the run goes through a source, and what of that a person may not have meant."""
    if use.tokens is None:
        line = f"corpus      {use.name}: NOT THERE YET, {use.taken:,} tokens are taken of it"
    else:
        line = f"corpus      {use.name}: {use.tokens:,} tokens, {_epochs(use.epochs)} epochs"
    if use.share < 1:
        line += f", {use.share:.1%} of the run"
    # Thousandths of the mixture, and --total-steps, may give a source more or less than was asked.
    if use.budget is not None and abs(use.taken - use.budget) > 0.01 * use.budget + seq_len:
        line += f", {use.taken:,} OF {use.budget:,} TOKENS ASKED"
    if use.epochs is not None and use.epochs > MOST_EPOCHS:
        line += f", MORE THAN {MOST_EPOCHS}, AFTER WHICH A REPETITION TEACHES LITTLE: add text or lower its share"
    return f"{line} ({use.path})"


def corpus_lines(order: SampleOrder, total_samples: int) -> list[str]:
    """A line for each source, and one for how it is packed."""
    lines = []
    for source, use in zip(order.sources, source_uses(order, total_samples), strict=True):
        lines.append(source_line(use, order.seq_len))
        if source.file.manifest and (mask := source.file.manifest.get("mask")):
            share = mask["loss_tokens"] / source.file.tokens
            lines.append(f"loss        {source.name}: {share:.1%} of its tokens count, the rest are of prompts")
        if isinstance(source.cut, Packed):
            header = source.cut.header
            lines.append(
                f"packing     {source.name}: {header['windows']:,} windows of whole documents, "
                f"{header['padding'] / (header['windows'] * (order.seq_len + 1)):.2%} padding, "
                f"{header['split'] / header['documents']:.2%} of {header['documents']:,} documents split"
            )
    return lines


def _epochs(epochs: float | None) -> str:
    """Two decimals; two digits of a share that would be 0.00."""
    assert epochs is not None, "of a file that is not there"
    return f"{epochs:,.2f}" if epochs >= 0.005 else f"{epochs:.2g}"


def _few(number: float) -> str:
    """One decimal; below 1 two digits, so that a little is not 0.0."""
    return f"{number:,.1f}" if number >= 1 else f"{number:.2g}"
