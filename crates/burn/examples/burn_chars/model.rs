//! The model: plain burn, which knows nothing of other processes.

use burn::module::Module;
use burn::nn::attention::generate_autoregressive_mask;
use burn::nn::transformer::{
    TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput,
};
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn::tensor::{Device, Int, Tensor};

use crate::text::LENGTH;

const WIDTH: usize = 64;

/// Reads letters and scores what may follow each of them.
#[derive(Module, Debug)]
pub(crate) struct Writer {
    letters: Embedding,
    places: Embedding,
    encoder: TransformerEncoder,
    next: Linear,
}

impl Writer {
    pub(crate) fn new(letters: usize, device: &Device) -> Self {
        let encoder = TransformerEncoderConfig::new(WIDTH, 4 * WIDTH, 4, 2)
            .with_dropout(0.0)
            .with_norm_first(true);
        Self {
            letters: EmbeddingConfig::new(letters, WIDTH).init(device),
            places: EmbeddingConfig::new(LENGTH, WIDTH).init(device),
            encoder: encoder.init(device),
            next: LinearConfig::new(WIDTH, letters).init(device),
        }
    }

    pub(crate) fn forward(&self, letters: Tensor<2, Int>) -> Tensor<3> {
        let ([batch, length], device) = (letters.dims(), letters.device());
        let places = Tensor::<1, Int>::arange(0..length as i64, &device).unsqueeze::<2>();
        let x = self.letters.forward(letters) + self.places.forward(places);
        let mask = generate_autoregressive_mask(batch, length, &device);
        let x = TransformerEncoderInput::new(x).mask_attn(mask);
        self.next.forward(self.encoder.forward(x))
    }
}
