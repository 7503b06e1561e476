"""Load a model for prediction, evaluation, export or serving: source, device, dtype, adapter, tokenizer, chat template.

auto_peft_model.py       AutoPeftModelForCausalLM and AutoPeftModelForSequenceClassification
arguments.py             command-line arguments for the model to load; does not import Paddle
load_model.py            base model with its adapter, merged where possible; tokenizer; context length
device_and_dtype.py      device and dtype of the weights
choose_chat_template.py  chat template: the requested template, or the template of the training run or tokenizer
"""
