//! From text to tokens and back: the tokenizer and the chat template that a GGUF file carries.

use candle_core::quantized::gguf_file::{Content, Value};
use candle_core::quantized::tokenizer::TokenizerFromGguf;
use candle_core::{Error, Result};
use minijinja::{Environment, context};
use tokenizers::Tokenizer;
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;

/// A tokenizer and a chat template.
pub struct Text {
    tokenizer: Tokenizer,
    template: Option<String>,
    /// The tokens that templates name.
    special: [(&'static str, String); 2],
    stop: Vec<u32>,
}

impl Text {
    /// The text of the file.
    ///
    /// # Errors
    /// If it has no tokenizer that candle can make.
    pub fn from_content(content: &Content) -> Result<Text> {
        let mut tokenizer = Tokenizer::from_gguf(content)?;
        let text = |key: &str| match content.metadata.get(key) {
            Some(Value::String(text)) => Some(text.as_str()),
            _ => None,
        };
        if text("tokenizer.ggml.pre") == Some("smollm") {
            // Candle takes an unknown tokenizer for GPT-2 with a space put before the text. SmolLM
            // splits digits, and puts nothing there.
            let parts: [PreTokenizerWrapper; 2] =
                [Digits::new(true).into(), ByteLevel::new(false, true, true).into()];
            tokenizer.with_pre_tokenizer(Some(Sequence::new(parts.into())));
        }
        let id = |name: &str| {
            let value = content.metadata.get(&format!("tokenizer.ggml.{name}_token_id"))?;
            value.to_u64().ok().map(|id| id as u32)
        };
        let token =
            |name: &str| id(name).and_then(|id| tokenizer.id_to_token(id)).unwrap_or_default();
        Ok(Text {
            template: text("tokenizer.chat_template").map(str::to_string),
            special: [("bos_token", token("bos")), ("eos_token", token("eos"))],
            stop: ["eos", "eot"].into_iter().filter_map(id).collect(),
            tokenizer,
        })
    }

    /// Tokens that end an answer.
    pub fn stop(&self) -> &[u32] {
        &self.stop
    }

    /// The tokens of a text as it stands.
    ///
    /// # Errors
    /// If the tokenizer fails.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>> {
        Ok(self.tokenizer.encode(text, add_special).map_err(Error::wrap)?.get_ids().to_vec())
    }

    /// The tokens of a question, in the form that the model was trained to answer.
    ///
    /// # Errors
    /// If the template or the tokenizer fails.
    pub fn question(&self, system: Option<&str>, user: &str) -> Result<Vec<u32>> {
        let Some(template) = &self.template else {
            return self.encode(user, true);
        };
        let mut messages = Vec::new();
        messages.extend(system.map(|text| context! { role => "system", content => text }));
        messages.push(context! { role => "user", content => user });
        let mut environment = Environment::new();
        environment.set_trim_blocks(true);
        environment.set_lstrip_blocks(true);
        environment
            .set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        let [(bos, bos_token), (eos, eos_token)] = &self.special;
        let special = std::collections::BTreeMap::from([(*bos, bos_token), (*eos, eos_token)]);
        let special = minijinja::Value::from_serialize(special);
        let values = context! { messages, add_generation_prompt => true, ..special };
        let text = environment.render_str(template, values).map_err(Error::wrap)?;
        // The template has put in the special tokens.
        self.encode(&text, false)
    }

    /// The text of tokens, special ones left out.
    ///
    /// # Errors
    /// If the tokenizer fails.
    pub fn decode(&self, tokens: &[u32]) -> Result<String> {
        self.tokenizer.decode(tokens, true).map_err(Error::wrap)
    }
}

/// Text that grows with its tokens, for printing as it comes.
#[derive(Debug, Default)]
pub struct Stream {
    tokens: Vec<u32>,
    printed: usize,
}

impl Stream {
    /// The text that a token adds; empty while a character is incomplete.
    ///
    /// # Errors
    /// If the tokenizer fails.
    pub fn push(&mut self, text: &Text, token: u32) -> Result<String> {
        self.tokens.push(token);
        let all = text.decode(&self.tokens)?;
        let complete = all.trim_end_matches('\u{fffd}');
        let new = complete.get(self.printed..).unwrap_or_default().to_string();
        self.printed += new.len();
        Ok(new)
    }
}
