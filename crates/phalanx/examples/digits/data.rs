//! The data set: 1,797 digits of 8 x 8 pixels, a fifth of them held out. All examples with digits
//! have this file.

use std::io::Read;

use flate2::read::GzDecoder;

/// Inside the program, so that it runs in any directory and under any launcher.
const FILE: &[u8] = include_bytes!("../../../../data/digits/digits.csv.gz");

/// Pixels of a digit.
pub(crate) const PIXELS: usize = 64;
/// Classes.
pub(crate) const CLASSES: usize = 10;
/// The largest value of a pixel.
const WHITE: u8 = 16;
/// One in this many is held out: the last of them, so the two parts never change.
const HELD_OUT: usize = 5;

/// Digits with their labels.
#[derive(Debug, Default)]
pub(crate) struct Digits {
    /// Between 0 and 1, [`PIXELS`] for each.
    pixels: Vec<f32>,
    labels: Vec<usize>,
}

impl Digits {
    /// The digits to train on, and those held out.
    pub(crate) fn load() -> Result<(Self, Self), String> {
        let mut text = String::new();
        let read = GzDecoder::new(FILE).read_to_string(&mut text);
        read.map_err(|err| format!("the digits cannot be unpacked: {err}"))?;
        let (mut train, mut held_out) = (Self::default(), Self::default());
        for (i, line) in text.lines().enumerate() {
            let part = match i % HELD_OUT == HELD_OUT - 1 {
                true => &mut held_out,
                false => &mut train,
            };
            let pushed = part.push(line);
            pushed.ok_or_else(|| format!("line {} of the digits is damaged", i + 1))?;
        }
        Ok((train, held_out))
    }

    fn push(&mut self, line: &str) -> Option<()> {
        let values: Vec<u8> = line
            .split(',')
            .map(|value| value.parse().ok())
            .collect::<Option<_>>()?;
        let (&label, pixels) = values.split_last()?;
        let fits = pixels.len() == PIXELS && pixels.iter().all(|&pixel| pixel <= WHITE);
        if !fits || usize::from(label) >= CLASSES {
            return None;
        }
        let scaled = pixels.iter().map(|&p| f32::from(p) / f32::from(WHITE));
        self.pixels.extend(scaled);
        self.labels.push(label.into());
        Some(())
    }

    /// How many there are.
    pub(crate) fn len(&self) -> usize {
        self.labels.len()
    }

    /// Some of them: pixels, [`PIXELS`] for each, and labels.
    pub(crate) fn batch(&self, indices: &[usize]) -> (Vec<f32>, Vec<usize>) {
        let digits = indices
            .iter()
            .map(|&i| &self.pixels[i * PIXELS..][..PIXELS]);
        let pixels = digits.flatten().copied().collect();
        let labels = indices.iter().map(|&i| self.labels[i]).collect();
        (pixels, labels)
    }
}
