"""Configurations: YAML within limits, what their fields say of themselves, and decoding with errors that help."""

from lockstep.configuration.decode import decode_config as decode_config
from lockstep.configuration.fields import choices_of as choices_of
from lockstep.configuration.fields import default_value as default_value
from lockstep.configuration.fields import field_texts as field_texts
from lockstep.configuration.fields import first_paragraph as first_paragraph
from lockstep.configuration.fields import options_of as options_of
from lockstep.configuration.fields import ordered_fields as ordered_fields
from lockstep.configuration.fields import refused_keys as refused_keys
from lockstep.configuration.yaml_values import load_yaml as load_yaml
from lockstep.configuration.yaml_values import read_yaml as read_yaml
from lockstep.configuration.yaml_values import yaml_reason as yaml_reason
