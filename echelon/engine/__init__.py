"""The plan made live on each rank: it executes exactly what the plan says.

run            Run: batches in, optimizer steps out; evaluate, save, load
run_state      what a run holds: data, model, optimizers, schedules
train_step     forward and backward of every micro-batch, one gradient, one update
loss_weighing  how the losses of a batch's parts add up to the loss of the batch
evaluate       loss and metrics over a data set
backends/      how gradients are exchanged: all-reduce or parameter server
parallel/      how the model is cut: data, fsdp, tensor, sequence, pipeline
buffers/       state that forward changes
checks/        what is compared while a run trains
checkpoint/    saving and loading
"""
